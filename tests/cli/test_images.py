"""`--image`: what the decoder is given, and what is refused before anything is loaded."""

from __future__ import annotations

import json

import pytest

from domino_spec import DominoDecoder
from tests.support.vision import (
    make_processor,
    make_tokenizer,
    make_vision_model,
    picture,
    question,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma3")
    make_vision_model("gemma3").save_pretrained(path)
    make_processor("gemma3", make_tokenizer("gemma3")).save_pretrained(path)
    picture(1).save(path / "a.png")
    picture(2).save(path / "b.jpg")
    return path


def test_generate_shows_the_files_before_the_text(domino, folder):
    images = [folder / "a.png", folder / "b.jpg"]
    options = ("--image", images[0], "--image", images[1], "-n", 6, "--json")
    result = domino("generate", folder, "a domino falls", "--draft", "lookup", *options)
    assert result.exit_code == 0, result.output
    decoder = DominoDecoder.from_pretrained(folder, None, engine="reference")
    chat = question(*images, text="a domino falls")
    expected = decoder.generate(chat, max_new_tokens=6).tokens
    assert json.loads(result.stdout)["generations"][0]["tokens"] == expected


def test_chat_shows_them_with_the_first_message(domino, folder):
    result = domino("chat", folder, "--image", folder / "a.png", "-n", 5, stdin="hi\nthere\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("tokens in") == 2


def test_what_cannot_be_shown_is_refused(domino, folder, target):
    image = ("--image", folder / "a.png")
    missing = domino("generate", folder, "a", "--image", folder / "none.png")
    assert "none.png is not there; expected a file." in missing.output
    assert (
        "--image is for one prompt; 2 are given."
        in domino("generate", folder, "a", "b", *image).output
    )
    assert "but --raw was given" in domino("generate", folder, "a", "--raw", *image).output
    text_only = domino("generate", target, "a", *image)
    assert "images are read by gemma3, qwen2_5_vl, qwen3_vl" in " ".join(text_only.output.split())
