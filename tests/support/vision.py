"""Small vision-language targets with their processors, and pictures."""

from __future__ import annotations

import copy

import torch
import transformers as tf
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.families import CONTEXT, HIDDEN, randomise
from tests.support.tokens import small_tokenizer

FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl")
VOCAB = 112
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
_GEMMA = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def make_tokenizer(family: str):
    """The small one with the family's tokens of images."""
    backend = copy.deepcopy(small_tokenizer().backend_tokenizer)
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        unk_token="<|pad|>", extra_special_tokens=_GEMMA if family == "gemma3" else {},
    )  # fmt: skip
    if family != "gemma3":
        tokenizer.add_tokens(list(_QWEN), special_tokens=True)
    image = "<boi>" if family == "gemma3" else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    return tokenizer


def make_processor(family: str, tokenizer):
    """Of pictures alone: Qwen's processor of videos needs torchvision."""
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return tf.Gemma3Processor(
            images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4
        )
    base = tf.Qwen3VLProcessor if family == "qwen3_vl" else tf.Qwen2_5_VLProcessor

    class Pictures(base):
        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024
    )
    return Pictures(images, tokenizer, None, chat_template=tokenizer.chat_template)


def make_vision_model(family: str, *, seed: int = 0):
    """Two layers of text, one of vision (two of Qwen3-VL, which passes states from the first)."""
    tokenizer = make_tokenizer(family)
    ids = tokenizer.convert_tokens_to_ids
    if family == "gemma3":
        text = {
            **_TEXT,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        vision = {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        }  # fmt: skip
        config = tf.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4,
            image_token_id=ids("<image>"), boi_token_id=ids("<boi>"), eoi_token_id=ids("<eoi>"),
            tie_word_embeddings=False,
        )  # fmt: skip
        model = tf.Gemma3ForConditionalGeneration(config)
    else:
        tokens = dict(zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            map(ids, _QWEN), strict=True,
        ))  # fmt: skip
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        text = {**_TEXT, "rope_parameters": rope}
        vision = {
            "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
        }  # fmt: skip
        if family == "qwen3_vl":
            vision |= {"depth": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
            config = tf.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
            model = tf.Qwen3VLForConditionalGeneration(config)
        else:
            del text["head_dim"]
            vision |= {"window_size": 16, "fullatt_block_indexes": [0]}
            config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
            model = tf.Qwen2_5_VLForConditionalGeneration(config)
    return randomise(model.float().eval(), 0.3, seed=seed)


def picture(seed: int = 0, size: tuple[int, int] = (24, 16)) -> Image.Image:
    """Noise, so that no two are alike."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def question(*images: object, text: str = "the quick fox") -> list[dict]:
    """A chat of one message: the images, then text."""
    parts: list[dict] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def plain_generate(model, processor, chat: list[dict], count: int) -> list[int]:
    """Transformers' own path from the chat to greedy tokens."""
    inputs = processor.apply_chat_template(
        copy.deepcopy(chat), tokenize=True, return_dict=True, return_tensors="pt",
        add_generation_prompt=True, processor_kwargs={"add_special_tokens": False},
    )  # fmt: skip
    length = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[0, length:].tolist()
