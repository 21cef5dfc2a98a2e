"""Images in chats: data URLs alone, within limits, and the answer of the decoder itself."""

import base64
import io

import httpx
import pytest
from PIL import Image

from domino_spec import DominoDecoder
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


def ask(server, *parts, role="user", **body):
    parts = [{"type": "image_url", "image_url": {"url": p}} if ":" in p else
             {"type": "text", "text": p} for p in parts]  # fmt: skip
    body = {
        "model": "tiny", "temperature": 0, "max_tokens": NEW, "ignore_eos": True,
        "messages": [{"role": role, "content": parts}], **body,
    }  # fmt: skip
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
