"""Options that commands share, and loading what they point at."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from domino_spec.cli.command import Voice
from domino_spec.errors import InputError, TargetError
from domino_spec.settings import (
    AcceptRule,
    DraftOptions,
    Dtype,
    Settings,
    TargetOptions,
    Thinking,
    require_folder,
    setting,
)

if TYPE_CHECKING:
    import torch

    from domino_spec.api import DominoDecoder
    from domino_spec.decoding import SamplingParams
    from domino_spec.grammars import Grammar
    from domino_spec.targets import LoadedTarget
    from domino_spec.targets.load import DtypeRule


TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="The target model: a folder, a GGUF file or a hub id."),
]
NoSpeculateOption = Annotated[
    bool, typer.Option("--no-speculate", help="Decode plainly, to compare with.")
]
QUIET = "The text alone: no progress, no statistics."
EngineName = Literal["auto", "fast", "reference"]
ACCEPT_UNSET = "coupled with a seed, which then keeps its text, else block"

_sampling = partial(setting, group="Sampling")
_engine = partial(setting, group="Engine")
_grammar = partial(setting, group="Structured outputs")


class OneDraftOptions(DraftOptions):
    """The same for commands that are about a drafter."""

    draft: str = setting(
        ...,
        "a drafter of any kind: a folder, a safetensors file, a hub id, released:NAME or "
        "lookup[:DEPTH]",
        group="Drafter",
    )


class ChatOptions(Settings):
    """Options of the chat template."""

    system: str | None = setting(None, "a system message", group="Chat template")
    thinking: Thinking = None

    def template_options(self) -> dict[str, Any]:
        """Extra arguments of the chat template."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


class SamplingOptions(Settings):
    """Every field of SamplingParams that can be written on a command line."""

    max_new_tokens: int = _sampling(256, "the longest answer", flags=("-n",))
    temperature: float = _sampling(0.0, "0 is greedy", flags=("-t",))
    top_k: int = _sampling(0, "0 is off")
    top_p: float = _sampling(1.0, "1 is off")
    min_p: float = _sampling(0.0, "0 is off")
    repetition_penalty: float = _sampling(1.0, "1 is off")
    presence_penalty: float = _sampling(0.0, "0 is off")
    frequency_penalty: float = _sampling(0.0, "0 is off")
    min_tokens: int = _sampling(0, "the shortest answer")
    seed: int | None = _sampling(None, "makes sampling repeatable")
    stop: tuple[str, ...] = _sampling((), "end before this text; repeatable")
    ignore_eos: bool = _sampling(False, "go on past the end of the sequence")
    accept: AcceptRule | None = _sampling(
        None, "how drafts are accepted when sampling", unset=ACCEPT_UNSET
    )

    def params(self) -> SamplingParams:
        """The checked parameters."""
        from domino_spec.decoding import SamplingParams

        return SamplingParams(**dict(self))


ImageOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", help="A file that a vision-language target is shown first; repeatable."
    ),
]


def require_images(images: Sequence[Path]) -> None:
    """Refuse a file that is not there before anything is loaded."""
    for path in images:
        if not path.is_file():
            raise InputError(f"the image {path} is not there; expected a file.")


def user_content(text: str, images: Sequence[Path]) -> str | list[dict[str, Any]]:
    """What a user says: the text, after the images if there are any."""
    if not images:
        return text
    shown = [{"type": "image", "image": path} for path in images]
    return [*shown, {"type": "text", "text": text}]


class GrammarOptions(Settings):
    """What the text must match; one of these at most."""

    json_schema: Path | None = _grammar(None, "the answer is JSON by the schema in this file")
    grammar: Path | None = _grammar(
        None, "the answer follows the grammar in this file, in Lark's notation or GBNF"
    )
    regex: str | None = _grammar(None, "the answer matches this regular expression")
    choice: tuple[str, ...] = _grammar((), "the answer is this text, or another such; repeatable")

    def read(self) -> Grammar | None:
        """The grammar; None where none is given."""
        from domino_spec.grammars import Grammar

        given = {name: value for name, value in dict(self).items() if value}
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise InputError(f"{names} are given together; give one.")
        for name, value in given.items():
            if name == "choice":
                return Grammar.choice(value)
            if isinstance(value, Path):
                try:
                    value = value.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise InputError(f"{value} cannot be read: {error}.") from error
            made: Grammar = getattr(Grammar, name)(value)
            return made
        return None


class LoopOptions(Settings):
    """Which loop decodes, and how."""

    engine: EngineName = _engine(
        "auto",
        "`fast` is the engine, reference the loop it is checked against; auto takes the engine "
        "where it can run the request",
    )
    pack: bool = _engine(
        True, "on a CPU, keep a second copy of the weights in the order it multiplies fastest"
    )


def require_places(
    voice: Voice,
    target: str,
    revision: str | None = None,
    *,
    base: str | None = None,
    draft: DraftOptions | None = None,
    drafts: Iterable[str | None] = (),
    prompts: Iterable[str] = (),
    data: Iterable[str] = (),
    out: str | Path | None = None,
) -> None:
    """Refuse what is missing at once: importing what would load the rest takes seconds."""
    from domino_spec.data.files import PROMPT_FILES, find_places
    from domino_spec.drafter.names import has_no_files
    from domino_spec.targets.place import require_target

    require_target(target, revision=revision, base=base)
    if out is not None:
        require_folder(out)
    for source in prompts:
        if Path(source).suffix:  # else the name of a built-in set, or a folder
            find_places(source, kinds=PROMPT_FILES)
    for source in data:
        find_places(source)
    for name in drafts if draft is None else [draft.draft]:
        if name is None or has_no_files(name):
            continue
        # NAME:OPTIONS may be of a kind that the registry knows, which needs PyTorch.
        if ":" not in name or "/" in name or name.startswith("released:"):
            require_drafter(voice, name, revision=draft.draft_revision if draft else None)


def require_drafter(voice: Voice, draft: str, *, revision: str | None = None) -> None:
    """Refuse a drafter that cannot be found; one on the hub is downloaded."""
    from domino_spec.checkpoints.files import locate

    voice.status(f"finding drafter {draft}")
    locate(draft, revision=revision)


def load_decoder(
    voice: Voice,
    target: str,
    target_options: TargetOptions,
    draft: DraftOptions,
    chat: ChatOptions,
    loop: LoopOptions | None = None,
    *,
    unpacks: bool = False,
) -> DominoDecoder:
    """A decoder with a tokenizer; what is wrong with the drafter is found out first.

    A GGUF file's own blocks are run where that can be, unless a command `unpacks` them.
    """
    if draft.draft is None and loop is not None:
        voice.note(
            "no drafter, so decoding is plain; --draft lookup drafts from the text itself, for any "
            "model, and `domino train` makes a better drafter"
        )
    loaded = load_target(voice, target, target_options, [draft], unpacks=unpacks)
    return make_decoder(loaded, draft, chat, loop)


def load_target(
    voice: Voice,
    target: str,
    options: TargetOptions,
    drafts: Sequence[DraftOptions],
    *,
    unpacks: bool = False,
) -> LoadedTarget:
    """The target with its tokenizer, after all that headers tell of drafters for it."""
    from domino_spec import targets

    for draft in drafts:
        check_drafter(target, options, draft)
    if not unpacks:
        options = with_own_blocks(voice, target, options)
    voice.status(f"loading target {target}")
    loaded = targets.load_target(target, **target_arguments(options))
    if loaded.tokenizer is None:
        raise _no_tokenizer(target)
    return loaded


def with_own_blocks(voice: Voice, target: str, options: TargetOptions) -> TargetOptions:
    """With `keep` for a GGUF file on a CPU that multiplies all of its blocks as they are.

    Any option that says how weights are to be loaded has its own way.
    """
    from domino_spec.targets.place import is_gguf

    asked = (options.quantize, options.dtype, options.device_map, options.attn_implementation)
    if any(value is not None for value in asked) or not is_gguf(target):
        return options
    if device_of(options.device).type != "cpu":
        return options
    from domino_spec.targets.quantized import multiplied_kinds

    kinds = multiplied_kinds(Path(target))
    if not kinds:
        return options
    voice.note(
        f"running the file's own blocks ({', '.join(kinds)}); --dtype float32 runs what they "
        "unpack to"
    )
    return options.replace(quantize="keep")


def _no_tokenizer(target: str) -> TargetError:
    return TargetError(
        f"{target} came without a tokenizer, so text cannot be read; expected tokenizer files "
        "next to its weights. Save the model's tokenizer there."
    )


class DescribedTarget(NamedTuple):
    """What a target's files tell without its weights."""

    architecture: str
    context_length: int | None
    has_chat_template: bool


def describe_target(target: str, options: TargetOptions) -> DescribedTarget:
    """Refuse what `load_target` would refuse before it reads weights."""
    from domino_spec.targets import load_config, load_tokenizer
    from domino_spec.targets.gguf_metadata import gguf_metadata, gguf_shape
    from domino_spec.targets.place import is_gguf
    from domino_spec.targets.support import check_config, static_rope_limit

    if is_gguf(target):  # its configuration comes with the conversion of its weights
        gguf_shape(Path(target))
        metadata = gguf_metadata(Path(target))
        kind = str(metadata.get("general.architecture"))
        if "tokenizer.ggml.tokens" not in metadata:
            raise _no_tokenizer(target)
        context = metadata.get(f"{kind}.context_length")
        return DescribedTarget(kind, context, "tokenizer.chat_template" in metadata)
    origin: dict[str, Any] = {
        "revision": options.revision, "trust_remote_code": options.trust_remote_code,
    }  # fmt: skip
    config = load_config(target, **origin)
    check_config(config, target)
    tokenizer = load_tokenizer(target, **origin)
    if tokenizer is None:
        raise _no_tokenizer(target)
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None), static_rope_limit(text)]
    return DescribedTarget(
        architecture=str(config.model_type),
        context_length=min((limit for limit in limits if limit is not None), default=None),
        has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
    )


def make_decoder(
    loaded: LoadedTarget, draft: DraftOptions, chat: ChatOptions, loop: LoopOptions | None = None
) -> DominoDecoder:
    """A decoder of a loaded target."""
    from domino_spec.api import DominoDecoder

    loop = loop or LoopOptions()
    return DominoDecoder.from_pretrained(
        loaded,
        **{name: getattr(draft, name) for name in DraftOptions.model_fields},
        chat_options=chat.template_options(),
        engine=loop.engine,
        pack=None if loop.pack else False,
    )


def check_drafter(target: str, options: TargetOptions, draft: DraftOptions) -> None:
    """All that config files and headers tell, before a large target is loaded."""
    from domino_spec.decoding.drafter import check_depth, check_tree
    from domino_spec.drafter.config import DrafterConfig
    from domino_spec.drafter.names import PLAIN
    from domino_spec.drafters.block import check_candidates, check_window
    from domino_spec.drafters.registry import describe_fitting_drafter

    if draft.draft in (None, PLAIN):
        return
    described = describe_fitting_drafter(
        str(draft.draft),
        target,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        draft_revision=draft.draft_revision,
        shift_label=draft.shift_label,
    )
    most = None if described.config is None else described.config.max_depth
    check_depth(draft.depth, described.drafts, most, what=described.words)
    branches = isinstance(described.config, DrafterConfig)
    check_tree(draft.tree, can_branch=branches, what=described.words)
    check_candidates(draft.candidates)
    if isinstance(described.config, DrafterConfig):
        check_window(draft.draft_window, draft.draft_sinks, block_size=described.config.block_size)


def target_arguments(options: TargetOptions) -> dict[str, Any]:
    """Keyword arguments of `targets.load_target`."""
    device_of(options.device)
    device_map: Any = options.device_map
    if device_map is not None and device_map.lstrip().startswith("{"):
        try:
            device_map = json.loads(device_map)
        except ValueError as error:
            raise InputError(
                f"device-map is {device_map!r}, which is not valid JSON ({error}); expected auto "
                "or an object of module names and devices."
            ) from error
    given = {name: getattr(options, name) for name in TargetOptions.model_fields}
    return {**given, "dtype": resolved_dtype(options.dtype), "device_map": device_map}


def resolved_dtype(name: Dtype | None) -> torch.dtype | str | DtypeRule | None:
    """As the loader takes it."""
    import torch

    from domino_spec.api.dtypes import fastest_dtype

    if name in (None, "auto"):
        return name
    return fastest_dtype if name == "fastest" else getattr(torch, str(name))


def device_of(name: str | None) -> torch.device:
    """The device of this name, or the default one; one that is not there is refused."""
    import torch

    from domino_spec.targets import default_device

    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"device is {name!r}; expected cpu, cuda or cuda:0, for example."
        ) from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(
            f"device is {name!r} but torch sees {count} GPUs here; use --device cpu, or a torch "
            "built for your GPU."
        )
    return device
