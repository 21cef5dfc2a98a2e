"""Chats with images: the target's own answer, token for token; and what is refused by name."""

import io
import re

import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from domino_spec import DominoDecoder
from domino_spec.api import decoder as decoder_module
from domino_spec.api import images
from domino_spec.api.custom_generate import DominoGenerate
from domino_spec.api.images import encode_image_chat, read_images
from domino_spec.api.notices import ReferenceLoopNotice
from domino_spec.decoding import RunStats, SamplingParams, decode
from domino_spec.errors import InputError, TargetError
from domino_spec.targets import Target, load_target, probe_target
from tests.support.drafters import Adversarial, Good, Oracle
from tests.support.families import make_target
from tests.support.tokens import small_tokenizer
from tests.support.vision import (
    FAMILIES,
    VOCAB,
    make_processor,
    make_tokenizer,
    make_vision_model,
    picture,
    plain_generate,
    question,
)

NEW = 16
GEMMA, QWEN = (make_processor(each, make_tokenizer(each)) for each in ("gemma3", "qwen3_vl"))
IMAGE = {GEMMA: "<image>", QWEN: "<|image_pad|>"}
SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112] = 6
"""Orientation: to be turned by 90 degrees, as phones write it."""
CHATS = [
    question(picture(1)),
    question(picture(2), picture(3, (40, 24)), text="a domino falls"),
    [{"role": "user", "content": "the next one falls"}],
    question(picture(4)),
]


@pytest.fixture(scope="module", params=FAMILIES)
def parts(request):
    """A target, its tokenizer and processor, and Transformers' answers to the chats."""
    model, tokenizer = make_vision_model(request.param), make_tokenizer(request.param)
    processor = make_processor(request.param, tokenizer)
    target = Target(model, name=request.param)
    probe_target(target)
    answers = [plain_generate(model, processor, chat, NEW) for chat in CHATS]
    assert answers[0] != answers[3], "the image must matter"
    return target, tokenizer, processor, answers


def decoder_of(parts, drafter=None, **options):
    target, tokenizer, processor, _ = parts
    return DominoDecoder(target, drafter, tokenizer, processor=processor, **options)


@pytest.mark.parametrize("kind", [Oracle, Good, Adversarial])
def test_answers_are_the_targets_own(parts, kind):
    """In a batch of chats with one image, with two of different sizes and with none."""
    answers = parts[3]
    decoder = decoder_of(parts, kind(answers, depth=5, vocab=VOCAB), engine="reference")
    found = decoder.generate(CHATS, max_new_tokens=NEW, ignore_eos=True)
    assert [each.tokens for each in found] == answers
    if kind is Oracle:
        assert all(each.stats.tokens_per_cycle > 3 for each in found)


def test_another_models_prompt_in_between_changes_nothing(parts):
    """Qwen keeps the last prompt's M-RoPE delta in the model; a sequence has its own."""
    decoder = decoder_of(parts, engine="reference")
    first = decoder.stream(CHATS[1], max_new_tokens=NEW, ignore_eos=True)
    tokens = [next(first).token]
    assert decoder.generate(CHATS[2], max_new_tokens=NEW, ignore_eos=True).tokens == parts[3][2]
    plain_generate(parts[0].model, parts[2], CHATS[0], 2)
    tokens += [each.token for each in first]
    assert tokens == parts[3][1]


def test_images_take_the_reference_loop(recwarn):
    family = "gemma3"
    tokenizer = make_tokenizer(family)
    options = {"processor": make_processor(family, tokenizer)}
    model = make_vision_model(family)
    decoder = DominoDecoder(model, None, tokenizer, **options)
    found = decoder.generate(CHATS[0], max_new_tokens=3)
    assert found.run.engine == "reference"
    assert "its prompt holds images" in found.run.engine_reason
    fast = DominoDecoder(model, None, tokenizer, engine="fast", **options)
    with pytest.raises(InputError, match="its prompt holds images"):
        fast.generate([CHATS[2], CHATS[0]], max_new_tokens=3)
    (sequence,) = decoder._sequences(
        [CHATS[0]], [SamplingParams(max_new_tokens=3)], RunStats(), speculate=False
    )
    with pytest.raises(InputError, match="its prompt holds images"):
        decoder.engine.add_request(sequence)


def test_text_is_the_engines_for_gemma_alone(parts):
    loop = "fast" if parts[0].name == "gemma3" else "reference"
    assert decoder_of(parts).generate(CHATS[2], max_new_tokens=1).run.engine == loop


def test_of_a_batch_the_images_alone_take_the_reference_loop(monkeypatch, recwarn):
    """Each answer, greedy or of a seed, is the reference loop's, and in its place."""
    tokenizer = make_tokenizer("gemma3")
    model, processor = make_vision_model("gemma3"), make_processor("gemma3", tokenizer)
    chats, seeded = [CHATS[2], CHATS[0], CHATS[2]], SamplingParams(temperature=1.0, seed=5)
    params = [SamplingParams(), seeded, seeded]
    batches, decode = [], decoder_module.decode

    def recording(target, drafter, batch, stats):
        batches.append([each.index for each in batch])
        return decode(target, drafter, batch, stats)

    monkeypatch.setattr(decoder_module, "decode", recording)
    found, expected = (
        decoder.generate(chats, params, max_new_tokens=6)
        for decoder in (
            DominoDecoder(model, "lookup", tokenizer, processor=processor, engine=engine)
            for engine in ("auto", "reference")
        )
    )
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert batches == [[1], [0, 2], [1]]
    run = found[0].run
    assert run.engine == "both"
    assert run.engine_reason == "as for 1 of 3 requests, its prompt holds images"
    assert run.whole_seconds > 0 < run.verify_seconds
    told = [str(each.message) for each in recwarn if each.category is ReferenceLoopNotice]
    assert len(told) == 1
    assert "as for the request, its prompt holds images" in told[0]


def test_files_and_bytes_are_read_as_pictures_are(parts, tmp_path):
    target, tokenizer, processor, answers = parts
    path, data = tmp_path / "a.png", io.BytesIO()
    picture(1).save(path)
    picture(1).save(data, "PNG")
    decoder = DominoDecoder(target, None, tokenizer, processor=processor, engine="reference")
    for image in (str(path), path, data.getvalue()):
        found = decoder.generate(question(image), max_new_tokens=NEW, ignore_eos=True)
        assert found.tokens == answers[0]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_photos_are_turned_as_transformers_turns_them(tmp_path, form):
    """Of orientation 6, from a file and from its bytes; a PIL image stays as it is, as there."""
    path = tmp_path / "photo"
    picture(1).save(path, form, exif=SIDEWAYS)
    expected = load_image(str(path))
    assert expected.size == (16, 24)
    for source in (path, path.read_bytes()):
        (found,) = read_images(question(source), GEMMA)
        assert (found.size, found.tobytes()) == (expected.size, expected.tobytes())
    with Image.open(path) as opened:
        assert read_images(question(opened), GEMMA)[0].size == (24, 16)


def test_a_file_whose_orientation_cannot_be_read_is_refused_by_name():
    data = io.BytesIO()
    picture(1).save(data, "WEBP", exif=SIDEWAYS)
    broken = data.getvalue().replace(b"MM\0*", b"MM\0?")
    with pytest.raises(InputError, match="image 1 of the prompt cannot be decoded: not a TIFF"):
        read_images(question(broken), GEMMA)


REFUSED = [
    ({"type": "image", "image": "https://a.example/b.png"}, "is a URL; expected a file's path"),
    ({"type": "image", "image": "missing.png"}, "the image missing.png cannot be read: No such"),
    ({"type": "image", "image": b"no picture"}, "10 bytes cannot be read: expected one of PNG"),
    ({"type": "image", "image": 3}, "an image is int; expected a PIL image"),
    ({"type": "image"}, "holds nothing; expected"),
    ({"type": "image_url", "image_url": {"url": "x"}}, "of type 'image_url' holds image_url"),
]


@pytest.mark.parametrize(("part", "words"), REFUSED)
def test_what_is_no_image_is_refused_by_name(part, words):
    with pytest.raises(InputError, match=words):
        read_images([{"role": "user", "content": [part]}], GEMMA)


def test_pixels_are_counted_before_they_are_decoded():
    """An image that the processor enlarges counts as what it becomes: 256 pixels, or 64."""
    large = question(picture(1, (20, 20)), picture(2, (20, 21)))
    assert len(read_images(large, GEMMA, max_pixels=820)) == 2
    with pytest.raises(InputError, match="image 2 of the prompt has 20 × 21 pixels, 820 with"):
        read_images(large, GEMMA, max_pixels=819)
    small = question(*[picture(1, (2, 2))] * 4)
    for processor, least in ((GEMMA, 256), (QWEN, 64)):
        assert len(read_images(small, processor, max_pixels=4 * least)) == 4
        words = f"image 4 .* 2 × 2 pixels, of which .* makes {least}, {4 * least} with those"
        with pytest.raises(InputError, match=words):
            read_images(small, processor, max_pixels=4 * least - 1)


@pytest.mark.parametrize(("processor", "tokens"), [(GEMMA, 4), (QWEN, 6)])
def test_tokens_are_counted_before_images_are_decoded(monkeypatch, processor, tokens):
    """As many as the processor then makes of them; of thousands of images few are looked at."""
    chat = question(*[picture(1)] * 3)
    ids, _ = encode_image_chat(chat, processor, processor.tokenizer, {}, max_tokens=3 * tokens)
    assert ids.count(processor.tokenizer.convert_tokens_to_ids(IMAGE[processor])) == 3 * tokens
    decoded = []
    monkeypatch.setattr(images, "_decode", lambda image, turn: decoded.append(image))
    words = f"image 3 of the prompt has {tokens} tokens .*, {3 * tokens} with those before it; "
    with pytest.raises(InputError, match=f"{words}expected {3 * tokens - 1} at most"):
        read_images(question(*[picture(1)] * 9999), processor, max_tokens=3 * tokens - 1)
    assert len(decoded) == 2


def test_an_image_that_the_processor_does_not_take_is_refused_by_name():
    with pytest.raises(InputError, match="image 1 of the prompt has 201 × 1 pixels.* aspect ratio"):
        read_images(question(picture(1, (201, 1))), QWEN)


def test_an_image_over_pillows_own_limit_says_so(monkeypatch):
    data = io.BytesIO()
    picture(1).save(data, "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InputError, match=r"Image size \(384 pixels\) exceeds limit of 200 pixels"):
        read_images(question(data.getvalue()), GEMMA)


@pytest.mark.parametrize(
    ("processor", "token"),
    [(QWEN, "<|image_pad|>"), (QWEN, "<|video_pad|>"), (GEMMA, "<boi>"), (GEMMA, "<image>")],
)
def test_a_text_that_names_the_processors_tokens_is_refused(processor, token):
    chat = question(picture(1), text=f"a {token} b")
    with pytest.raises(InputError, match=rf"the chat with 1 images has '{re.escape(token)}' "):
        encode_image_chat(chat, processor, processor.tokenizer, {})


def test_a_truncated_file_is_refused_by_name():
    data = io.BytesIO()
    picture(1, (64, 64)).save(data, "PNG")
    with pytest.raises(InputError, match="image 1 of the prompt cannot be decoded"):
        read_images(question(data.getvalue()[:2000]), GEMMA)


def test_generate_takes_text_of_a_vision_language_target_and_names_images(parts):
    """Transformers gives such a target positions and types of every prompt, with images or not."""
    target, tokenizer, processor, _ = parts
    model, method = target.model, DominoGenerate("lookup", depth=3)
    options = {"max_new_tokens": 6, "do_sample": False}
    processed = processor(text=["the quick fox the quick"], return_tensors="pt")
    padded = tokenizer(
        ["the quick fox", "fox"], return_tensors="pt", padding=True, padding_side="left"
    )
    for inputs in (processed, padded):
        expected = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, custom_generate=method), expected)
    inputs = processor.apply_chat_template(
        question(picture(1)), tokenize=True, return_dict=True, return_tensors="pt"
    )
    with pytest.raises(InputError, match=r"the prompt holds images \(found .*Use DominoDecoder"):
        model.generate(**inputs, **options, custom_generate=method)


def test_a_target_of_text_refuses_images_by_name():
    decoder = DominoDecoder(make_target("llama"), None, small_tokenizer())
    with pytest.raises(TargetError, match="it is a LlamaForCausalLM; images are read by gemma3"):
        decoder.generate(question(picture()), max_new_tokens=3)


def test_a_target_without_its_processor_says_so():
    decoder = DominoDecoder(make_vision_model("gemma3"), None, make_tokenizer("gemma3"))
    with pytest.raises(InputError, match="came without a processor; pass processor="):
        decoder.generate(question(picture()), max_new_tokens=3)


def test_scores_of_a_prompt_with_images_are_refused_by_name(parts):
    with pytest.raises(InputError, match="prompt_logprobs are asked for of a prompt with images"):
        decoder_of(parts).generate(CHATS[0], max_new_tokens=3, prompt_logprobs=1)


def test_a_batch_of_the_loop_refuses_images_by_name(parts):
    decoder = decoder_of(parts)
    params = [SamplingParams(max_new_tokens=3)] * 2
    sequences = decoder._sequences(CHATS[1:3], params, RunStats(), speculate=False)
    with pytest.raises(InputError, match="1 of 2 sequences have images in their prompts"):
        next(decode(decoder.target, None, sequences))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_with_its_vision_tower(tmp_path, family):
    """Its processor is loaded at the first image."""
    make_vision_model(family).save_pretrained(tmp_path)
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_target(tmp_path, dtype=torch.float32, device="cpu")
    loaded.target.check_images()
    with pytest.raises(TargetError, match=r"the processor of .* cannot be loaded|is missing"):
        DominoDecoder.from_pretrained(loaded, None).generate(CHATS[0])
    if family == "gemma3":
        make_processor(family, tokenizer).save_pretrained(tmp_path)
        decoder = DominoDecoder.from_pretrained(tmp_path, None, engine="reference")
        expected = plain_generate(loaded.target.model, decoder.processor, CHATS[0], 4)
        found = decoder.generate(CHATS[0], max_new_tokens=4, ignore_eos=True)
        assert found.tokens == expected
