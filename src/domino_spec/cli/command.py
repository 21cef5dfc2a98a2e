"""A command: options from pydantic models, a voice, errors as one line, exit codes."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from domino_spec.errors import DominoError, Notice
from domino_spec.settings import default_text, presentation

DEBUG_VARIABLE = "DOMINO_DEBUG"
_PIPED_WIDTH = 120
_SECONDS_BETWEEN_LINES = 30.0


class Voice:
    """Where a command says what."""

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, json_lines: bool = False
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._indent = None if json_lines else 2
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._warned: set[str] = set()
        self._held: list[tuple[str, str]] = []
        self._holding = False

    @property
    def has_colour(self) -> bool:
        """Whether the text on stdout can be coloured."""
        return self.out.color_system is not None and not self.out.no_color

    @property
    def shows_bars(self) -> bool:
        """Whether downloads and loading may draw their progress bars."""
        return self.err.is_terminal and not self.as_json and not self.quiet

    def say(self, line: str, style: str = "") -> None:
        """A line of the result."""
        self._line(self.out, line, style)

    def status(self, message: str) -> None:
        """Say what takes a while. A line, not a spinner: library bars may follow below it."""
        if not self.quiet:
            self._line(self.err, message, "dim")

    def working(self, message: str) -> AbstractContextManager[Any]:
        """A spinner on a terminal, for work that draws no bars of its own."""
        if not self.shows_bars:
            return nullcontext()
        return self.err.status(Text(message, style="dim"))

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int | None], None]]:
        """Called with a name and how much of how much is done: a bar each on a terminal."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn())  # fmt: skip
        # Drawn four times a second: a client has responses to read in the meantime.
        with Progress(*columns, console=self.err, disable=not self.shows_bars, transient=True,
                      refresh_per_second=4) as bars:  # fmt: skip
            tasks: dict[str, Any] = {}
            say = self._now_and_then(at_once=0)

            def update(name: str, done: int, total: int | None) -> None:
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=total)
                bars.update(tasks[name], completed=done)
                if not self.shows_bars:
                    say(f"{name}: {done}" + (f" of {total}" if total else ""))

            yield update

    @contextmanager
    def ticker(self) -> Iterator[Callable[[str], None]]:
        """Called with how far it is, in words: a line that is redrawn on a terminal."""
        with self.working("starting") as shown:
            yield self._now_and_then(at_once=2) if shown is None else shown.update

    def _now_and_then(self, *, at_once: int) -> Callable[[str], None]:
        """Say the first few lines, and then one every half minute."""
        left, said = at_once, time.monotonic()

        def say(line: str) -> None:
            nonlocal left, said
            if left or time.monotonic() - said >= _SECONDS_BETWEEN_LINES:
                left, said = max(left - 1, 0), time.monotonic()
                self.status(line)

        return say

    def note(self, message: str) -> None:
        """Something worth knowing about a result; not said when quiet or to machines."""
        if not self.quiet and not self.as_json:
            self._line(self.err, message, "dim")

    def warn(self, message: str) -> None:
        """A warning, once: the same one with other figures is not repeated."""
        self._once(_one_line(message), self.warnings, "warning: ", "yellow")

    def notice(self, message: str) -> None:
        """What a library thinks worth knowing, once: a note, in JSON output too."""
        self._once(_one_line(message), self.notes, "", "dim")

    def _once(self, message: str, told: list[str], prefix: str, style: str) -> None:
        gist = re.sub(r"\d+", "", message)
        if gist in self._warned:
            return
        self._warned.add(gist)
        told.append(message)
        if prefix or not (self.quiet or self.as_json):
            self._held.append((prefix + message, style))
            if not self._holding:
                self._release()

    def _release(self) -> None:
        for line, style in self._held:
            self._line(self.err, line, style)
        self._held.clear()

    @contextmanager
    def holding_warnings(self) -> Iterator[None]:
        """Keep warnings and notices out of streamed text; they follow when it has ended."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            self._release()

    def document(self, values: Any) -> None:
        """The one JSON document of a command, or one line of a command that writes JSON lines."""
        sys.stdout.write(json.dumps(values, indent=self._indent, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def error(self, message: str) -> None:
        """One red line."""
        self._line(self.err, f"error: {_one_line(message)}", "red")

    def fail(self, error: Exception) -> None:
        """Report what ended the command."""
        if debugging():
            traceback.print_exception(error, file=sys.stderr)
        message = str(error) or type(error).__name__
        if not isinstance(error, DominoError):
            message = f"{type(error).__name__}: {message}"
            if not debugging():
                message += f" (run again with {DEBUG_VARIABLE}=1 for the traceback)"
        self.error(message)
        if self.as_json:
            self.document({"error": {"type": type(error).__name__, "message": _one_line(message)}})

    def _line(self, console: Console, message: str, style: str) -> None:
        console.print(Text(message, style=style), soft_wrap=True)

    def _show_warning(
        self, message: Warning | str, category: type[Warning], *_: Any, **__: Any
    ) -> None:
        (self.notice if issubclass(category, Notice) else self.warn)(str(message))


@contextmanager
def speaking(
    *, as_json: bool = False, quiet: bool = False, json_lines: bool = False, failure: int = 1
) -> Iterator[Voice]:
    """Run a command's body: calm libraries, warnings and errors as one line, exit codes.

    An error exits with `failure`: commands whose 1 is an answer take another code for it.
    """
    voice = Voice(as_json=as_json, quiet=quiet, json_lines=json_lines)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = voice._show_warning
            _calm_libraries(bars=voice.shows_bars)
            yield voice
        sys.stdout.flush()
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        voice.err.print("\ninterrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of the output closed it; nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except Exception as error:
        voice.fail(error)
        raise typer.Exit(failure) from None


def debugging() -> bool:
    """Whether tracebacks and library messages are wanted."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def _calm_libraries(*, bars: bool) -> None:
    """By the variables that libraries read when they are imported, or at once where they are."""
    if not bars:
        # The GGUF reader knows no switch but tqdm's.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not debugging():
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "huggingface_hub" in sys.modules and not bars:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging

        if not bars:
            logging.disable_progress_bar()
        if not debugging():
            logging.set_verbosity_error()


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def _one_line(message: str) -> str:
    return " ".join(message.split())


JSON = "One JSON document on stdout and nothing else there."
Command = Callable[..., None]


def command(
    *,
    as_json: str | None = JSON,
    quiet: str | None = None,
    json_lines: bool = False,
    failure: int = 1,
) -> Callable[[Command], Command]:
    """A command whose first parameter is its voice; a text for --json or --quiet adds it.

    Each field of a model among the parameters is an option of its own. A parameter
    `Annotated[dict[str, Any], Model]` gets the settings that were given, unchecked. Errors exit
    with `failure`.
    """
    switches = {
        "as_json": as_json and typer.Option("--json", help=as_json),
        "quiet": quiet and typer.Option("--quiet", "-q", help=quiet),
    }

    def wrap(body: Command) -> Command:
        hints = get_type_hints(body, include_extras=True)
        groups: dict[str, list[inspect.Parameter]] = {}
        parameters: list[inspect.Parameter] = []
        for name, parameter in list(inspect.signature(body).parameters.items())[1:]:
            (among,) = getattr(hints[name], "__metadata__", (None,))[:1]
            if _is_model(hints[name]) or _is_model(among):
                model = among or hints[name]
                groups[name] = list(_model_options(model, partial=among is not None))
                parameters += groups[name]
            else:
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(parameter.replace(annotation=hints[name], kind=kind))
        parameters += [
            _parameter(name, False, Annotated[bool, option])
            for name, option in switches.items()
            if option
        ]

        @functools.wraps(body)
        def flat(**values: Any) -> None:
            said = {name: values.pop(name, False) for name in switches}
            with speaking(**said, json_lines=json_lines, failure=failure) as voice:
                for name, options in groups.items():
                    fields = {option.name: values.pop(option.name) for option in options}
                    given = {field: v for field, v in fields.items() if v not in (None, [])}
                    values[name] = hints[name](**given)
                body(voice, **values)

        flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return flat

    return wrap


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _model_options(model: type[BaseModel], *, partial: bool) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(model)  # without constraints, which pydantic checks
    for name, field in model.model_fields.items():
        if presentation(field):
            yield _setting_option(name, hints[name], field, partial=partial)


def _setting_option(name: str, hint: Any, field: FieldInfo, *, partial: bool) -> inspect.Parameter:
    """A field made by `setting`; `partial`: it may come from elsewhere, so unset is None."""
    shown, words = presentation(field), str(field.description).removesuffix(".")
    default = None if partial or field.is_required() else field.default
    unset = None if field.is_required() else default_text(field)
    more: dict[str, Any] = {
        "help": f"{words[0].upper()}{words[1:]}.".replace("`", ""),
        "show_default": (unset or "").replace("`", "") or False
        if default is None
        else default is not False,
    }
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is dict:
        hint, more["metavar"] = str, "JSON"
    elif get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
        default = None if default is None else list(default)
    if shown["argument"] is not None:
        option = typer.Argument(metavar=shown["argument"] or name.upper(), **more)
    else:
        flag = name.replace("_", "-")
        names = f"--{flag}/--no-{flag}" if hint is bool else f"--{flag}"
        option = typer.Option(names, *shown["flags"], rich_help_panel=shown["group"], **more)
    if field.is_required() and not partial:
        default = inspect.Parameter.empty
    return _parameter(name, default, Annotated[hint | None, option])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
