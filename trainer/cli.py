"""The command `trainer`, also `python -m trainer`: parse, call the library, map errors.

A setting comes from the flag, else the environment (`TRAINER_PRETRAIN_EPOCHS`), else the TOML file
of `--config` (one table a command: `[pretrain]`, `[pool.build]`), else its default. Exit codes are
those of `protocol/errors.py`. Torch is imported by the commands that need it, not from here.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Parameter,
    Token,
    UnknownCommandError,
    convert,
)
from cyclopts.config import Dict, Env

from protocol.errors import ConfigError, ExitCode, UserError
from protocol.schema import load_toml
from trainer.files import refused

ENVIRONMENT = "TRAINER_"
# What each stage does, and examples of it.
STAGES = {
    "pretrain": (
        "Pretrain an encoder of clips by masked reconstruction, without labels.",
        "trainer pretrain --pool pool --output runs",
        "trainer pretrain --index pilot.json --epochs 20",
        "trainer pretrain --resume",
    ),
    "finetune": (
        "Fine-tune a pretrained encoder on the labels, by each arm.",
        "trainer finetune --pool pool --output runs",
        "trainer finetune --arm lp-ft --from-run pretrain.0001.0000",
        "trainer finetune --base champion",
    ),
    "export": (
        "Export the best fine-tuned arm as ONNX, in a ship bundle that checks itself.",
        "trainer export --pool pool --output runs",
        "trainer export --arm lp-ft --json",
    ),
    "gate": (
        "Judge the exported bundle against the champion, and promote the better.",
        "trainer gate --pool pool --output runs",
        "trainer gate --dry-run --json",
        "trainer gate --margin 0.5 --fail-on-hold",
    ),
}
POOL_COMMANDS = ("build", "describe", "sample")
GROUPS = {"pool": POOL_COMMANDS, "bench": ("loader",)}
TABLES = (*(f"pool.{name}" for name in POOL_COMMANDS), *STAGES)
COMMANDS = ("pool", *STAGES, "check", "bench")


def examples(*lines: str) -> str:
    """Return the epilogue of a command's help."""
    return "\n".join(["Examples:", "", *(f"    {line}" for line in lines)]) + "\n"


def _convert(hint: Any, tokens: Sequence[Token]) -> Any:
    """Convert as cyclopts does, but refuse a fraction for a whole number, which it would round."""
    if hint is int and "." in tokens[0].value:
        raise CoercionError(token=tokens[0], target_type=int)
    return convert(hint, tokens)


app = App(
    name="trainer",
    help="Train clip encoders: a pool of clips, pretraining, fine-tuning, export and a gate.",
    help_epilogue=examples(
        "trainer pool build --output pool            # then, in this order:",
        "trainer pretrain --pool pool --output runs",
        "trainer finetune --pool pool --output runs",
        "trainer export --pool pool --output runs",
        "trainer gate --pool pool --output runs",
    )
    + """
A setting comes from the flag, else the environment (TRAINER_PRETRAIN_EPOCHS), else --config.

Exit codes:
    0    done, for gate: judged
    1    a fault of ours
    2    a flag or setting is wrong
    3    the settings file is wrong
    4    data is damaged or foreign, or a file cannot be read or written
    6    the champion changed meanwhile
    7    another process is at this run
    8    training diverged, or held with --fail-on-hold
    130  interrupted
""",
    help_format="plaintext",
    version=lambda: importlib.metadata.version("syncd"),
    default_parameter=Parameter(negative=(), converter=_convert),
    suppress_keyboard_interrupt=False,
)
app.command(
    "trainer.commands.pool:app",
    name="pool",
    help="The pool of clips: build one, look into one, draw a sample of one.",
)
for _stage, (_help, *_lines) in STAGES.items():
    app.command(
        f"trainer.commands.{_stage}:command",
        name=_stage,
        help=_help,
        help_epilogue=examples(*_lines),
    )
app.command(
    "trainer.commands.check:command",
    name="check",
    help="Verify every byte of a ship bundle, by itself, and show what it is.",
    help_epilogue=examples("trainer check runs/artifacts/export.0001.0000/export.0001.0000.ship"),
)
app.command(
    "trainer.commands.bench:app",
    name="bench",
    help="Measure what the trainer does, beside what else could be used.",
)
app.register_install_completion_command()
# An interrupt is ours to report (see main), and not to be turned into an exit by the parser.
app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Path | None = None,
) -> Any:
    """Run a command.

    Parameters
    ----------
    config
        TOML file of settings, one table a command.
    """
    sources: list[Any] = [Env(ENVIRONMENT)]
    if config is not None:
        sources.append(Dict(read_settings(config), source=str(config)))
    app.config = tuple(sources)
    return app(tokens, exit_on_error=False, print_error=False)


def read_settings(path: Path) -> dict[str, Any]:
    """Read a TOML file of settings.

    Raises ConfigError when it is missing, no TOML, or has something that is no command's table.
    """
    what = "read the settings"
    try:
        # Some editors begin a file with a byte-order mark, which TOML does not know.
        text = path.read_bytes().decode("utf-8-sig")
        settings = load_toml(text)
        if "\\u0000" in text or "\\U00000000" in text:
            raise ConfigError(what, path=path, why="it has a NUL character, of no use anywhere")
    except OSError as error:
        raise ConfigError(what, path=path, why=error.strerror or str(error)) from error
    except ValueError as error:
        raise ConfigError(what, path=path, why=f"not TOML: {error}") from error
    tables = dict(settings)
    inner = tables.pop("pool", {})
    tables |= {f"pool.{name}": table for name, table in _items(inner)}
    for name, table in tables.items():
        if name not in TABLES or not isinstance(table, dict):
            near = difflib.get_close_matches(name, TABLES, n=1)
            raise ConfigError(
                what,
                path=path,
                why=f"[{name}] is no command's table",
                hint=f"Did you mean [{near[0]}]?" if near else f"Tables: {', '.join(TABLES)}.",
            )
    return settings


def _items(table: Any) -> list[tuple[str, Any]]:
    """Return a table's entries; what is no table stands as one without a name."""
    return list(table.items()) if isinstance(table, dict) else [("", table)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code. A fault of ours raises."""
    tokens = sys.argv[1:] if arguments is None else arguments
    try:
        app.meta(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()  # here, where a reader that has gone is no fault
    except UserError as error:
        return _fail(str(error), error.exit_code, getattr(error, "__notes__", ()))
    except UnknownCommandError as error:
        return _fail(_unknown_command(error), ExitCode.USAGE)
    except CycloptsError as error:
        return _fail(str(error), _exit_code(error))
    except ImportError as error:
        missing = _missing_package(error)
        if missing is None:
            raise
        why = f"this command needs the package {missing}. pip install 'syncd[trainer]'"
        return _fail(why, ExitCode.USAGE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _refused(error)
    except KeyboardInterrupt:
        return _fail("interrupted; --resume goes on from the last checkpoint", ExitCode.INTERRUPTED)
    return ExitCode.OK


def _refused(error: OSError) -> int:
    """Report what the system refused; without an error number it is a fault of ours."""
    if error.errno is None:
        raise error
    notes = getattr(error, "__notes__", ())
    told = refused("use a file", error.filename, error)
    return _fail(str(told), told.exit_code, notes)


def _exit_code(error: CycloptsError) -> ExitCode:
    """A wrong value in the TOML file is the file's error, anything else the command line's."""
    source = getattr(getattr(error, "token", None), "source", "cli")
    return ExitCode.USAGE if source in ("cli", "env", "") else ExitCode.CONFIG


def _unknown_command(error: UnknownCommandError) -> str:
    # cyclopts' own message imports every command, torch and all, to look for aliases.
    name = (error.unused_tokens or [""])[0]
    group = next((name for name in error.command_chain or () if name in GROUPS), "")
    known = GROUPS[group] if group else COMMANDS
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(known)}."
    return f"unknown command {f'{group} {name}'.strip()!r}. {hint}"


def _missing_package(error: BaseException) -> str | None:
    """Return the package of someone else's that is not installed, if that is the cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    root = (cause.name or "").split(".")[0] if cause is not None else ""
    return root if root not in ("", "trainer", "protocol") else None


def _fail(message: str, code: ExitCode, notes: Sequence[str] = ()) -> int:
    print(f"trainer: error: {message}", *notes, sep="\n  ", file=sys.stderr)
    return code
