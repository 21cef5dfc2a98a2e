"""Vocabularies with the structure of real families, a few hundred tokens small.

The special, unused, reserved and padding tokens are those of the models, with the flags of their
Hugging Face tokenizers and the types that GGUF files give them; the text's tokens are few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import transformers as tf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6


@dataclass(frozen=True)
class Token:
    text: str
    type: int = NORMAL  # as a GGUF file says it
    special: bool | None = None  # as a Hugging Face tokenizer says it; None: a token of the text


@dataclass(frozen=True)
class Vocabulary:
    """The tokens in the order of their ids; `rows` is the size of the model's embedding."""

    architecture: str
    tokens: tuple[Token, ...]
    rows: int
    eos: str
    template: str
    bos: str | None = None
    pad: str | None = None
    unk: str | None = None
    own_mask: str | None = None
    pre: str = "qwen2"
    add_bos: bool | None = None
    merges: tuple[str, ...] = ("Ġ t", "h e")

    @property
    def byte_level(self) -> bool:
        return not self.architecture.startswith("gemma")

    def id(self, text: str) -> int:
        return [token.text for token in self.tokens].index(text)

    def gguf_tokens(self) -> list[Token]:
        """A GGUF file names every row of the embedding and none beyond."""
        padding = [Token(f"[PAD{i}]", UNUSED) for i in range(len(self.tokens), self.rows)]
        return [*self.tokens[: self.rows], *padding]


def _text() -> list[Token]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [Token(letter) for letter in letters] + [Token("Ġt"), Token("he")]


def _added(type: int, special: bool, *texts: str) -> list[Token]:
    return [Token(text, type, special) for text in texts]


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen2_5(*, padding: int = 271) -> Vocabulary:
    """No BOS; the tokens after </tool_call> are control tokens in GGUF, not special elsewhere."""
    media = [f"<|{kind}_{end}|>" for kind in ("object_ref", "box", "quad", "vision") for end in
             ("start", "end")]  # fmt: skip
    pads = [f"<|{kind}_pad|>" for kind in ("vision", "image", "video")]
    code = [f"<|{n}|>" for n in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name",
            "file_sep")]  # fmt: skip
    tokens = (
        *_text(),
        *_added(CONTROL, True, "<|endoftext|>", "<|im_start|>", "<|im_end|>", *media, *pads),
        *_added(USER_DEFINED, False, "<tool_call>", "</tool_call>"),
        *_added(CONTROL, False, *code),
    )
    return Vocabulary(
        architecture="qwen2", tokens=tokens, rows=len(tokens) + padding, eos="<|im_end|>",
        pad="<|endoftext|>", template=_CHATML + "<tool_call>", add_bos=False,
    )  # fmt: skip


def qwen3() -> Vocabulary:
    base = qwen2_5()
    thinking = ("<tool_response>", "</tool_response>", "<think>", "</think>")
    tokens = (*base.tokens, *_added(USER_DEFINED, False, *thinking))
    template = base.template + "<tool_response><think></think>"
    return replace(base, architecture="qwen3", tokens=tokens, template=template)


def llama3() -> Vocabulary:
    """Llama 3.2: as many rows as tokens, 256 special ones, most of them reserved."""
    names = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id",
             6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id",
             10: "python_tag"}  # fmt: skip
    free = (f"reserved_special_token_{number}" for number in range(256))
    specials = [f"<|{names[i] if i in names else next(free)}|>" for i in range(256)]
    tokens = (*_text(), *_added(CONTROL, True, *specials))
    template = (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
        "{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
    )
    return Vocabulary(
        architecture="llama", tokens=tokens, rows=len(tokens), bos="<|begin_of_text|>",
        eos="<|eot_id|>", template=template, pre="llama-bpe", add_bos=True,
    )  # fmt: skip


def smollm2() -> Vocabulary:
    """As many rows as tokens, nothing unused or reserved; BOS opens every turn."""
    names = ("repo_name", "reponame", "file_sep", "filename", "gh_stars", "issue_start",
             "issue_comment", "issue_closed", "jupyter_start", "jupyter_text", "jupyter_code",
             "jupyter_output", "jupyter_script", "empty_output")  # fmt: skip
    ends = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokens = (*_added(CONTROL, True, *ends, *(f"<{name}>" for name in names)), *_text())
    return Vocabulary(
        architecture="llama", tokens=tokens, rows=len(tokens), bos="<|im_start|>",
        eos="<|im_end|>", pad="<|im_end|>", unk="<|endoftext|>", template=_CHATML, pre="smollm",
        add_bos=False,
    )  # fmt: skip


def gemma3(*, images: bool) -> Vocabulary:
    """Sentencepiece; the 1B has a row fewer than tokens, larger ones 63 more."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz▁:,", "he", "▁t"]
    tokens = (
        *_added(CONTROL, True, "<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
        *_added(USER_DEFINED, False, "[multimodal]"),
        *_added(CONTROL, False, *(f"<unused{i}>" for i in range(99))),
        *_added(CONTROL, True, "<start_of_turn>", "<end_of_turn>"),
        *[Token(f"<0x{byte:02X}>", BYTE) for byte in range(256)],
        *[Token(piece) for piece in pieces],
        *_added(CONTROL, True, "<start_of_image>", "<end_of_image>"),
        *_added(CONTROL, False, *(f"<unused{i}>" for i in range(99, 150))),
        *_added(CONTROL, True, "<image_soft_token>"),
    )
    template = (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
        "<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    return Vocabulary(
        architecture="gemma3", tokens=tokens, rows=len(tokens) + (63 if images else -1),
        bos="<bos>", eos="<end_of_turn>", pad="<pad>", unk="<unk>", own_mask="<mask>",
        template=template, add_bos=True, merges=("h e", "▁ t"),
    )  # fmt: skip


def save_hugging_face(vocabulary: Vocabulary, folder: Path) -> Path:
    """The tokenizer and the configuration of a model's folder."""
    pairs = [tuple(pair.split(" ")) for pair in vocabulary.merges]
    everything = {token.text: i for i, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(models.BPE(vocab=everything, merges=pairs, unk_token=vocabulary.unk))
    if vocabulary.byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Replace("▁", " ")
    for token in vocabulary.tokens:
        if token.special is not None:
            add = backend.add_special_tokens if token.special else backend.add_tokens
            add([AddedToken(token.text, normalized=False, special=token.special)])
    names = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "pad_token": vocabulary.pad,
             "unk_token": vocabulary.unk, "mask_token": vocabulary.own_mask}  # fmt: skip
    named = {name: token for name, token in names.items() if token is not None}
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = vocabulary.template
    tokenizer.save_pretrained(folder)
    tf.LlamaConfig(vocab_size=vocabulary.rows).save_pretrained(folder)
    return folder
