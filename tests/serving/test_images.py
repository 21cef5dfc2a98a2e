"""Images in chats: data URLs alone, within limits, and the answer of the decoder itself."""

import asyncio
import base64
import gc
import io
import sys
import weakref
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import FunctionType, ModuleType

import httpx
import pytest
from PIL import Image
from torch import Tensor

from domino_spec import DominoDecoder
from domino_spec.serving.completions import CompletionHandler
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.images import ImagePrompt, PixelSlot
from domino_spec.serving.protocol import ChatCompletionRequest
from domino_spec.serving.service import Service
from tests.serving.live import live
from tests.support.vision import (
    make_processor,
    make_tokenizer,
    make_vision_model,
    picture,
    question,
)

NEW = 8


@pytest.fixture(scope="module")
def decoder():
    """On the engine for text, with a drafter that any target has."""
    tokenizer = make_tokenizer("gemma3")
    processor = make_processor("gemma3", tokenizer)
    model = make_vision_model("gemma3")
    return DominoDecoder(model, "lookup", tokenizer, processor=processor, depth=3)


@pytest.fixture(scope="module")
def server(decoder):
    with live(decoder, slots=2, page=False, max_image_bytes=4000, max_image_pixels=900) as found:
        yield found


def data_url(image, form="PNG", **options) -> str:
    file = io.BytesIO()
    image.save(file, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def body_of(*parts, role="user", **body):
    parts = [{"type": "image_url", "image_url": {"url": p}} if ":" in p else
             {"type": "text", "text": p} for p in parts]  # fmt: skip
    return {
        "model": "tiny", "temperature": 0, "max_tokens": NEW, "ignore_eos": True,
        "messages": [{"role": role, "content": parts}], **body,
    }  # fmt: skip


def ask(server, *parts, role="user", **body):
    body = body_of(*parts, role=role, **body)
    return httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)


def test_the_answer_is_the_decoders(server, decoder):
    images = [picture(1), picture(2)]
    for count in (1, 2):
        expected = decoder.generate(
            question(*images[:count], text="a fox"), max_new_tokens=NEW, ignore_eos=True
        )
        reply = ask(server, *map(data_url, images[:count]), "a fox").json()
        assert reply["choices"][0]["message"]["content"] == expected.text
        assert reply["usage"]["prompt_tokens"] == len(expected.prompt_tokens)


def test_a_photo_is_turned_as_its_orientation_says(server):
    """The same pixels, upright, give the same log-probabilities; sideways they give others."""
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = picture(1).transpose(Image.Transpose.ROTATE_270)
    urls = data_url(picture(1), exif=exif), data_url(upright), data_url(picture(1))
    replies = [ask(server, url, logprobs=True, max_tokens=1).json()["choices"][0] for url in urls]
    turned, expected, sideways = (reply["logprobs"]["content"] for reply in replies)
    assert turned == expected != sideways


def test_the_same_text_after_another_image_reuses_nothing(server):
    """Its token ids are the same; a choice of its own is decoded for each `n`."""
    one, other = (ask(server, data_url(picture(seed)), "a fox", n=2).json() for seed in (1, 4))
    first, second = ([c["message"]["content"] for c in each["choices"]] for each in (one, other))
    assert first[0] == first[1] != second[0] == second[1]
    assert not (other["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")


def test_text_alone_stays_on_the_engine(server, decoder):
    reply = ask(server, "a fox").json()["choices"][0]["message"]["content"]
    expected = decoder.generate(
        [{"role": "user", "content": "a fox"}], max_new_tokens=NEW, ignore_eos=True
    )
    assert expected.run.engine == "fast"
    assert reply == expected.text


REFUSED = {
    "https": (["https://a.example/b.png"], "a URL with https is not supported", "url"),
    "http": (["http://127.0.0.1/b.png"], "a URL with http is not supported", "url"),
    "file": (["file:///etc/passwd"], "a URL with file is not supported", "url"),
    "svg": (["data:image/svg+xml,<svg/>"], "is not base64", "url"),
    "base64": (["data:image/png;base64,a*b="], "does not hold base64", "messages"),
    "no image": (
        ["data:image/png;base64,aGk="],
        "2 bytes cannot be read: expected one",
        "messages",
    ),
    "bytes": ([data_url(picture(1, (40, 40)), "BMP")], "this server takes 4000", "messages"),
    "pixels": ([data_url(picture(1, (20, 20)))] * 3, "expected 900 at most", "messages"),
    "special": ([data_url(picture()), "<|end|>"], "name of a special token", "messages"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_by_name(server, kind):
    parts, words, param = REFUSED[kind]
    reply = ask(server, *parts)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert words in error["message"]
    assert error["param"].endswith(param)


def test_many_tiny_images_are_refused_before_they_are_processed(server, decoder):
    """A body of a few bytes an image, of which the processor would make 256 pixels and 4 tokens."""
    url = data_url(picture(1, (1, 1)))
    error = ask(server, *[url] * 200).json()["error"]
    assert "image 4 of the prompt has 1 × 1 pixels" in error["message"]
    assert "makes 256, 1024 with those before it; expected 900 at most" in error["message"]
    with live(decoder, slots=1, page=False, max_prompt_tokens=50) as found:
        error = ask(found, *[url] * 200).json()["error"]
    assert "image 13 of the prompt has 4 tokens" in error["message"]
    assert "52 with those before it; expected 50 at most" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_images_are_a_users_alone(server):
    reply = ask(server, data_url(picture()), role="system")
    assert reply.status_code == 400
    assert "only a user's message may" in reply.json()["error"]["message"]


def test_a_target_of_text_refuses_them():
    with live(slots=1, page=False) as found:
        reply = ask(found, data_url(picture()), "a fox")
    assert reply.status_code == 400
    assert "images are read by gemma3" in reply.json()["error"]["message"]


# What waits ---------------------------------------------------------------------------------------


def objects_of(root, shared=frozenset()):
    """What an object keeps alive, by identity, without the `shared`, types, modules and globals."""
    found, left = {}, [root]
    while left:
        each = left.pop()
        if id(each) in found or id(each) in shared or isinstance(each, (type, ModuleType)):
            continue
        found[id(each)] = each
        parts = gc.get_referents(each)
        if isinstance(each, FunctionType):
            parts = [*(each.__closure__ or ()), *(each.__defaults__ or ()), each.__kwdefaults__]
        left += parts
    return found


def bytes_of(objects):
    tensors = [each for each in objects.values() if isinstance(each, Tensor)]
    return sum(map(sys.getsizeof, objects.values())) + sum(each.nbytes for each in tensors)


class Counted:
    """A processor of images of 512 × 512 pixels; what it made, and whether that is still there."""

    def __init__(self, tokenizer):
        self._processor = make_processor("gemma3", tokenizer)
        self._processor.image_processor.size = {"height": 512, "width": 512}
        self.made = []

    def __getattr__(self, name):
        return getattr(self._processor, name)

    def __call__(self, **given):
        found = self._processor(**given)
        self.made.append(weakref.ref(found["pixel_values"]))
        return found

    @property
    def held(self):
        return sum(made() is not None for made in self.made)


def test_requests_that_wait_hold_their_files_and_no_pixel_values():
    """3 MB each, of a file of a kilobyte; those of one request at most are there already."""
    tokenizer = make_tokenizer("gemma3")
    processor = Counted(tokenizer)
    decoder = DominoDecoder(make_vision_model("gemma3"), None, tokenizer, processor=processor)
    service = Service(decoder, ServerConfig(model="tiny", slots=2, context=128))
    handler = CompletionHandler(service)
    body = body_of(data_url(picture(1)), data_url(picture(2)), "a fox", n=2)

    async def accept():
        request = ChatCompletionRequest.model_validate(body)
        response = await handler.chat_completions(request)
        service.submit(response._sequences, client="")  # to an engine that was not started
        return response

    async def accept_all():
        await accept()  # what the first request builds for all is no request's
        shared = objects_of([service, handler, ChatCompletionRequest])
        return [await accept() for _ in range(3)], shared

    waiting, shared = asyncio.run(accept_all())
    assert service.engine.waiting == 8
    for each in waiting:
        held = objects_of(each, shared)
        assert bytes_of(held) < 100_000
        assert any(isinstance(part, bytes) and part[:4] == b"\x89PNG" for part in held.values())
    del shared, held  # pixel values of the first among them
    assert len(processor.made) == 4
    assert processor.held == 1


def test_answers_of_requests_that_waited_are_the_decoders(server, decoder, monkeypatch):
    """Two choices each, of images of their own: pixel values that were dropped are made again."""
    made, make = [], ImagePrompt.make
    monkeypatch.setattr(ImagePrompt, "make", lambda prompt: made.append(prompt) or make(prompt))
    seeds = range(10, 16)
    with ThreadPoolExecutor(len(seeds)) as clients:
        replies = list(
            clients.map(lambda seed: ask(server, data_url(picture(seed)), "a fox", n=2), seeds)
        )
    for seed, reply in zip(seeds, replies, strict=True):
        expected = decoder.generate(
            question(picture(seed), text="a fox"), max_new_tokens=NEW, ignore_eos=True
        )
        texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
        assert texts == [expected.text] * 2
    assert len(made) >= len(seeds), "of the second choices at least"


def test_pixel_values_that_cannot_be_made_again_end_their_request_alone(server, monkeypatch):
    def fail(prompt):
        raise MemoryError

    url, expected = data_url(picture(1)), ask(server, data_url(picture(1)), "a fox").json()
    with monkeypatch.context() as patch:
        patch.setattr(ImagePrompt, "make", fail)
        reply = ask(server, url, "a fox", n=2)
    assert reply.status_code == 500
    assert "its log says why" in reply.json()["error"]["message"]
    found = ask(server, url, "a fox").json()
    assert found["choices"] == expected["choices"]


class Later(Executor):
    """Does what it was given when it is told to."""

    def __init__(self):
        self.work = []

    def submit(self, function):
        self.work.append((function, Future()))
        return self.work[-1][1]

    def run(self):
        for function, future in self.work:
            if future.set_running_or_notify_cancel():
                future.set_result(function())
        self.work.clear()


class Prompt:
    def __init__(self, name):
        self.made = {"pixel_values": name}

    def make(self):
        return dict(self.made)


def test_the_slot_is_the_next_ones():
    """Until the engine names one, the last accepted one's; afterwards of no other until taken."""
    thread = Later()
    slot = PixelSlot(thread)
    a, b, c, d = map(Prompt, "abcd")
    slot.offer(a, a.made)
    assert slot.take(a) is a.made
    slot.offer(b, b.made)  # refused by the queue, say: it never comes
    slot.offer(c, c.made)
    slot.claim(c)
    slot.offer(d, d.made)
    assert slot.take(c) is c.made
    slot.claim(d)
    slot.claim(d)
    slot.claim(a)  # its client is served before
    (_, abandoned), _ = thread.work
    assert abandoned.cancelled()
    thread.run()
    assert slot.take(a) == a.made
    slot.claim(d)  # and is cancelled: the next one that is accepted takes its place
    slot.offer(b, b.made)
    thread.submit = lambda make: ThreadPoolExecutor(1).submit(make)
    assert slot.take(a) == a.made
    slot.offer(b, b.made)
    assert slot.take(b) is b.made
