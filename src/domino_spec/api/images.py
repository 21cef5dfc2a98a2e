"""Chats with images, through Transformers' own processor of the target."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from domino_spec.api.prompts import render_chat, require_tokenizer
from domino_spec.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of images that are decoded; of an animation the first frame."""
_SOURCES = ("image", "path")
_PART = "image"


class ImageTokensError(InputError):
    """A prompt whose images alone have more tokens than there is room for."""


def holds_images(prompt: Any) -> bool:
    """Whether a prompt is a chat in which some part is an image."""
    if isinstance(prompt, (str, Tensor)) or not isinstance(prompt, Sequence):
        return False
    return any(_is_image(part) for message in prompt for part in _parts(message))


def encode_image_chat(
    messages: Sequence[Mapping[str, Any]],
    processor: Any,
    tokenizer: Any,
    options: Mapping[str, Any],
    *,
    max_pixels: int | None = None,
    max_tokens: int | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a chat, and what else the target's prefill takes.

    A part `{"type": "image", "image": ...}` holds a PIL image, a file's path or its bytes.
    `max_pixels` and `max_tokens` are those of all images together.
    """
    images = read_images(messages, processor, max_pixels=max_pixels, max_tokens=max_tokens)
    text = _render(messages, processor, tokenizer, options)
    _check_marks(text, processor, len(images))
    try:
        found = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise InputError(
            f"the target's processor ({type(processor).__name__}) does not take this chat with "
            f"{len(images)} images: {error}"
        ) from error
    given = dict(found)
    tokens = [int(token) for token in given.pop("input_ids")[0].tolist()]
    given.pop("attention_mask", None)  # one prompt has no padding
    return tokens, given


def read_images(
    messages: Sequence[Mapping[str, Any]],
    processor: Any,
    *,
    max_pixels: int | None = None,
    max_tokens: int | None = None,
) -> list[Image]:
    """All images of a chat in RGB, in order; none is decoded that would be over a limit.

    A file of a few bytes may hold many pixels, and a few pixels become many in the processor.
    """
    found, pixels, tokens = list[Any](), 0, 0
    least = _least_pixels(processor)
    for message in messages:
        for part in filter(_is_image, _parts(message)):
            image = _open(_source(part))
            own = image.width * image.height
            which = f"image {len(found) + 1} of the prompt"
            size = f"{image.width} × {image.height} pixels"
            if own < least:
                size += f", of which the target's processor makes {least}"
            pixels += max(own, least)
            if max_pixels is not None and pixels > max_pixels:
                raise InputError(
                    f"{which} has {size}, {pixels} with those before it; expected {max_pixels} at "
                    "most. Send smaller or fewer images."
                )
            try:
                counted = processor._get_num_multimodal_tokens([(image.height, image.width)])
            except ValueError as error:
                raise InputError(
                    f"{which} has {size}, which the target's processor does not take: {error}."
                ) from error
            (count,) = counted.num_image_tokens
            tokens += count
            if max_tokens is not None and tokens > max_tokens:
                raise ImageTokensError(
                    f"{which} has {count} tokens ({size}), {tokens} with those before it; expected "
                    f"{max_tokens} at most, text included. Send smaller or fewer images."
                )
            try:
                found.append(_decode(image, turn=image is not _source(part)))
            except (OSError, ValueError, SyntaxError, TypeError, struct.error) as error:
                raise InputError(f"{which} cannot be decoded: {error}.") from error
    return found


def _least_pixels(processor: Any) -> int:
    """Of any image, once the processor has resized it: Gemma's are of one size."""
    size = dict(processor.image_processor.size)
    if size.get("height") and size.get("width"):
        return int(size["height"] * size["width"])
    return int(size.get("shortest_edge") or 0)  # by Qwen's name an area


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, (list, tuple)) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and str(part.get("type", "")).startswith(_PART)


def _source(part: Mapping[str, Any]) -> Any:
    given = [name for name in _SOURCES if part.get(name) is not None]
    if part["type"] != _PART or len(given) != 1:
        others = ", ".join(sorted(set(map(str, part)) - {"type"})) or "nothing"
        raise InputError(
            f"a part of type {part['type']!r} holds {others}; expected "
            '{"type": "image", "image": ...} with a PIL image, a file\'s path or its bytes. '
            "Download what has a URL first."
        )
    return part[given[0]]


def _open(source: Any) -> Any:
    """Its header is read, its pixels are not."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError(
            "images need the pillow package; install it, or domino-spec[vision]."
        ) from error
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, str) and "://" in source:
        raise InputError(
            f"the image {source[:80]!r} is a URL; expected a file's path. Download it first."
        )
    if not isinstance(source, (str, Path, bytes)):
        raise InputError(
            f"an image is {type(source).__name__}; expected a PIL image, a file's path or its "
            "bytes."
        )
    name = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        return Image.open(file, formats=FORMATS)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = getattr(error, "strerror", None) or f"expected one of {', '.join(FORMATS)}"
        if isinstance(error, Image.DecompressionBombError):
            why = f"{str(error).rstrip('.')}; give a smaller one"
        raise InputError(f"the image {name} cannot be read: {why}.") from error


def _decode(image: Any, *, turn: bool) -> Image:
    """In RGB; a file's is turned as its EXIF orientation says, as Transformers turns it."""
    if turn:
        from PIL import ImageOps

        ImageOps.exif_transpose(image, in_place=True)
    decoded: Image = image.convert("RGB")
    return decoded


def _render(
    messages: Sequence[Mapping[str, Any]],
    processor: Any,
    tokenizer: Any,
    options: Mapping[str, Any],
) -> str:
    """With the processor's template, which may know of images where the tokenizer's does not."""
    template = getattr(processor, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    bare = [_without_images(message) for message in messages]
    given = options if template is None else {"chat_template": template, **options}
    return render_chat(bare, require_tokenizer(tokenizer), given)


def _check_marks(text: str, processor: Any, images: int) -> None:
    """Refuse a text that names the processor's own tokens: it would look for their images."""
    owners = ((processor.tokenizer, "image_token"), (processor, "video_token"))
    expected = {getattr(owner, name, None): 0 for owner, name in owners}
    expected[processor.image_token] = images
    for token, count in expected.items():
        found = text.count(token) if token else count
        if found != count:
            raise InputError(
                f"the chat with {images} images has {token!r} {found} times; expected {count}: the "
                "chat template alone writes such tokens, one for each image. Leave it out of the "
                "text."
            )


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates take it: where its images stand, not what they are."""
    if not _parts(message):
        return dict(message)
    parts = [{"type": _PART} if _is_image(part) else part for part in _parts(message)]
    return {**message, "content": parts}
