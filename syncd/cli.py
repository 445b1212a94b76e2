"""The command `syncd`, also `python -m syncd`: parse, call the library, map errors to exit codes.

Exit codes are those of `protocol/errors.py`. The shared folder is `--folder`, else $SYNCD_FOLDER,
else the current folder or one above it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json as jsonlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, validators

from protocol.errors import ConfigError, DataError, ExitCode, RunFailedError, UsageError, UserError
from protocol.logs import parse_log_line
from protocol.paths import Layout
from protocol.queue import encode_script, parse_command, readable
from protocol.states import Result
from protocol.wire import Role

if TYPE_CHECKING:
    from syncd.view import CommandView

Folder = Annotated[Path | None, Parameter(name=["--folder", "-C"], env_var="SYNCD_FOLDER")]
Json = Annotated[bool, Parameter(negative=(), show_default=False)]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Fallback = Annotated[tuple[str, ...], Parameter(negative=())]
BRIDGE_ADDRESS = "127.0.0.1:8766"

app = App(
    name="syncd",
    help="""Drive a GPU that can only be rented by the notebook cell, through a shared folder.""",
    help_epilogue="""Examples:

    syncd demo                     see it work, on this machine
    syncd init --role controller --remote drive:syncd
                                   make this folder the laptop's end
    syncd watch                    keep this end in sync
    syncd watch --tunnel cloudflared
                                   the same without a cloud drive
    syncd run pretrain --wait      or append run:pretrain to queue.txt
    syncd logs -f pretrain         follow a log

Exit codes:

    0  done                        5    the remote cannot be reached
    1  a fault of ours             6    refused by rule
    2  usage                       7    another process is there
    3  a file you wrote is wrong   8    the run did not succeed
    4  data is damaged or missing  130  interrupted
""",
    help_format="plaintext",
    version=lambda: importlib.metadata.version("syncd"),
)
app.register_install_completion_command()


def _layout(folder: Path | None) -> Layout:
    from syncd.view import find_folder

    return find_folder(folder or Path())


def _print_json(value: Any) -> None:
    print(jsonlib.dumps(value, indent=1, ensure_ascii=False))


@app.command(
    help_epilogue=(
        "Examples:\n\n"
        "    syncd init --role controller --remote drive:syncd\n"
        "    syncd init --role controller --bridge\n"
        "    syncd init --role worker --remote drive:syncd --key-file key\n"
        "    syncd init --bridge --fallback drive:syncd\n"
        "    syncd init --rotate\n"
    )
)
def init(
    *,
    role: Role = Role.CONTROLLER,
    remote: str = "",
    fallback: Fallback = (),
    bridge: Flag = False,
    folder: Folder = None,
    key_file: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    unsealed: Flag = False,
    rotate: Flag = False,
    rclone_config: str = "",
) -> None:
    """Make a folder one end of a shared folder: its settings, its key, its places.

    Parameters
    ----------
    role
        `controller` for the laptop, `worker` for the machine with the GPU.
    remote
        What rclone calls a remote and a path ("drive:syncd"), a local folder,
        or the URL that `syncd bridge` prints; else from $SYNCD_REMOTE.
    fallback
        A further remote, for when those before do not answer, each of which gets everything;
        else from $SYNCD_FALLBACK.
    bridge
        Do without a remote of others: workers reach this folder through `syncd bridge`.
    folder
        The folder to make; the current one by default.
    key_file
        The other end's key (its .syncd/key); "-" reads it from standard input.
        A controller without one makes it; a worker also takes it from $SYNCD_KEY.
    unsealed
        Do without a key: whoever can write to the remote can then run code on the worker.
    rotate
        Replace the key of an end that is at work: by a new one at the controller, which the
        worker then takes with --key-file. Nothing that was sent before is lost.
    rclone_config
        Another configuration file than rclone's own.
    """
    from syncd.config import texts
    from syncd.setup import initialise
    from syncd.setup import rotate as rotate_key

    if rotate:
        if remote or fallback or bridge or unsealed or rclone_config:
            raise UsageError("syncd init", why="--rotate goes with --key-file and --folder alone")
        print(rotate_key(_layout(folder), key_file=key_file))
        return
    layout = Layout((folder or Path()).resolve())
    if bridge:
        from syncd.bridge import objects_folder

        if remote or role is Role.WORKER:
            raise UsageError(
                "syncd init", why="--bridge is for a controller, and goes without --remote"
            )
        remote = str(objects_folder(layout))
    remote = remote or os.environ.get("SYNCD_REMOTE", "")
    if not remote:
        raise UsageError(
            "syncd init", why="--remote is missing", hint="E.g. drive:syncd; or give --bridge."
        )
    told = initialise(
        layout,
        role=role,
        remote=remote,
        fallback=fallback or texts("fallback", os.environ.get("SYNCD_FALLBACK", "")),
        key_file=key_file,
        unsealed=unsealed,
        rclone_config=rclone_config,
    )
    print(told)


@app.command(
    help_epilogue=(
        "Examples:\n\n"
        "    syncd watch\n"
        "    syncd watch --tunnel cloudflared\n"
        "    syncd watch --role worker --remote drive:syncd --folder /content/syncd\n"
        "    syncd watch --stop-when-idle 30m\n"
    )
)
def watch(
    *,
    role: Role | None = None,
    remote: str | None = None,
    fallback: Fallback = (),
    bridge: Flag = False,
    address: str = BRIDGE_ADDRESS,
    tunnel: str = "",
    url: str = "",
    stop_when_idle: str | None = None,
    folder: Folder = None,
    verbose: Annotated[
        bool, Parameter(name=["--verbose", "-v"], negative=(), show_default=False)
    ] = False,
) -> None:
    """Keep this end in sync, until it is interrupted. On the worker: run what the queue says.

    Stages run detached: they go on when this ends, and are found again when it is started anew.

    Parameters
    ----------
    role
        `controller` or `worker`; else from $SYNCD_ROLE or syncd.toml.
    remote
        The remote; else from $SYNCD_REMOTE or syncd.toml.
    fallback
        A further remote, for when those before do not answer; else from $SYNCD_FALLBACK.
    bridge
        Run a bridge beside, so that workers reach this folder; --tunnel does so too.
    address
        Where the bridge listens: see `syncd bridge`.
    tunnel
        The bridge's tunnel: see `syncd bridge`.
    url
        Where a worker reaches the bridge, when the tunnel cannot tell.
    stop_when_idle
        Have the worker leave once it had nothing to do for
        so long ("30m"), and all that it made is safe
        elsewhere; else from $SYNCD_STOP_WHEN_IDLE or syncd.toml.
    folder
        The shared folder's end here.
    verbose
        Say more.
    """
    from syncd.config import load_settings

    told = (role or os.environ.get("SYNCD_ROLE")) and (remote or os.environ.get("SYNCD_REMOTE"))
    layout = Layout(folder.resolve()) if folder and told else _layout(folder)
    flags = {"role": role, "remote": remote, "fallback": fallback or None}
    settings = load_settings(layout, {**flags, "stop_when_idle": stop_when_idle})
    if settings.stop_when_idle and settings.role is not Role.WORKER:
        raise UsageError(
            "syncd watch",
            why="stop_when_idle is for a worker, and this end is the controller's",
            hint="Give it where the worker is started; `syncd bootstrap` passes it on.",
        )
    start_logging(verbose=verbose)
    with contextlib.ExitStack() as beside:
        if bridge or tunnel:
            from syncd.bridge.command import running

            more = running(layout, settings, address=address, tunnel=tunnel, url=url)
            beside.enter_context(more)
        if settings.role is Role.WORKER:
            from syncd.platform import check_worker_system

            check_worker_system()
            from syncd.worker import Worker

            Worker(layout, settings).run()
        else:
            from syncd.controller import Controller

            Controller(layout, settings).run()


def start_logging(*, verbose: bool) -> None:
    """Have the daemons' log go to standard error."""
    from syncd.show import LineFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.DEBUG if verbose else logging.INFO)


@app.command(
    help_epilogue=("Examples:\n\n    syncd run pretrain\n    syncd run pretrain --wait --json\n")
)
def run(
    stage: str,
    /,
    *,
    wait: Annotated[
        bool, Parameter(name=["--wait", "-w"], negative=(), show_default=False)
    ] = False,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Append run:STAGE to the queue.

    Parameters
    ----------
    stage
        A stage that serve/stages.toml defines.
    wait
        Wait until it has ended; the exit code is 8 when it did not succeed.
    folder
        The shared folder's end here.
    json
        Print the command as JSON (with --wait, as it ended).
    """
    from syncd.view import check_stage

    layout = _layout(folder)
    _append(layout, f"run:{check_stage(layout, stage)}", wait=wait, json=json)


@app.command(
    help_epilogue=("Examples:\n\n    syncd sh 'nvidia-smi' --wait\n    syncd sh - < clean.sh\n")
)
def sh(
    command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    wait: Annotated[
        bool, Parameter(name=["--wait", "-w"], negative=(), show_default=False)
    ] = False,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Append a shell command to the queue; /bin/sh runs it once, in the worker's folder.

    Parameters
    ----------
    command
        A shell script; "-" reads it from standard input.
    wait
        Wait until it has ended; the exit code is 8 when it did not succeed.
    folder
        The shared folder's end here.
    json
        Print the command as JSON (with --wait, as it ended).
    """
    script = sys.stdin.buffer.read() if command == "-" else os.fsencode(command)
    if not script.strip():
        raise UsageError("syncd sh", why="the command is empty")
    try:
        line = encode_script(script.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError("syncd sh", why=f"the command is not UTF-8: {error.reason}") from error
    parse_command(line)
    _append(_layout(folder), line, wait=wait, json=json)


@app.command(help_epilogue=("Examples:\n\n    syncd stop pretrain\n"))
def stop(stage: str, /, *, folder: Folder = None, json: Json = False) -> None:
    """Append stop:STAGE to the queue: its run ends, and those that wait are not started.

    Parameters
    ----------
    stage
        A stage that serve/stages.toml defines.
    folder
        The shared folder's end here.
    json
        Print the command as JSON.
    """
    from syncd.view import check_stage

    layout = _layout(folder)
    _append(layout, f"stop:{check_stage(layout, stage)}", wait=False, json=json)


def _append(layout: Layout, line: str, *, wait: bool, json: bool) -> None:
    from syncd.config import load_settings
    from syncd.view import append_commands, is_watched, read_commands

    if load_settings(layout, {}).role is Role.WORKER:
        raise UsageError(
            "append to the queue",
            path=layout.root,
            why="this end is the worker's",
            hint="Append at the controller's end.",
        )
    known = max((view.number for view in read_commands(layout)), default=0)
    append_commands(layout, [line])
    if not wait:
        if json:
            _print_json({"line": line})
        else:
            print(f"appended {readable(line)[:60]}")
    if is_watched(layout) is False:
        _note(f"nothing takes it up: start `syncd watch` in {layout.root}")
    if wait:
        _wait(layout, line, known, json=json)


def _wait(layout: Layout, line: str, known: int, *, json: bool) -> None:
    from syncd.view import wait_for

    view = None
    try:
        for view in wait_for(layout, line, known):
            if not json:
                _note(_step(view))
    except KeyboardInterrupt:
        _note("no longer waiting; the command goes on, and `syncd status` shows how")
        raise
    assert view is not None
    if json:
        _print_json(asdict(view))
    elif view.attempt and line.startswith("sh:"):
        _print_output(layout.shell_log(view.number))
    elif view.attempt:
        _note(f"its output: syncd logs {line.removeprefix('run:')}")
    if view.result is not Result.SUCCESS:
        why = f"{view.result}: {view.cause}".rstrip(": ")
        raise RunFailedError(view.run_id or readable(line)[:60], why=why)


def _print_output(log: Path) -> None:
    """Print what a command wrote; the runner's own lines are left out."""
    from syncd.view import tail

    for line in tail(log, None).splitlines(keepends=True):
        if parse_log_line(line.rstrip(b"\n")) is None:
            sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _step(view: CommandView) -> str:
    told = f" as {view.result}: {view.cause}".rstrip(": ") if view.result else ""
    again = f", attempt {view.attempt}" if view.attempt > 1 and not told else ""
    return f"{view.run_id or readable(view.line)} {view.state}{again}{told}"


def _note(text: str) -> None:
    print(text, file=sys.stderr)


@app.command(
    help_epilogue=(
        "Examples:\n\n    syncd status\n    syncd status -n 100\n"
        "    syncd status --json | jq '.commands[-1].state'\n"
    )
)
def status(
    *,
    lines: Annotated[
        int | None, Parameter(name=["--lines", "-n"], validator=validators.Number(gte=1))
    ] = None,
    all: Flag = False,  # noqa: A002 (the flag's name)
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Show the queue's commands, what waits to be sent, and how the worker is.

    Parameters
    ----------
    lines
        The last so many commands (20 by default), each with its run id and how long it took.
    all
        All of them.
    folder
        The shared folder's end here.
    json
        Print commands and the worker's status as JSON.
    """
    from syncd.show import print_status
    from syncd.view import (
        is_watched,
        read_age,
        read_commands,
        read_problems,
        read_status,
        read_unsent,
    )

    layout = _layout(folder)
    commands, worker = read_commands(layout), read_status(layout)
    problems, unsent = read_problems(layout), read_unsent(layout)
    watched = is_watched(layout)
    if json:
        _print_json(
            {
                "commands": [asdict(view) for view in commands],
                "worker": asdict(worker) if worker else None,
                "problems": problems,
                "unsent": asdict(unsent) if unsent else None,
                "watched": watched,
            }
        )
    else:
        most = len(commands) if all else lines
        print_status(commands, worker, problems, unsent, most=most, age=read_age(layout))
        if watched is False:
            _note(f"No `syncd watch` runs in {layout.root}: what is shown may be old.")


@app.command(help_epilogue=("Examples:\n\n    syncd logs pretrain\n    syncd logs -f pretrain\n"))
def logs(
    stage: str,
    /,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative=(), show_default=False)
    ] = False,
    lines: Annotated[
        int | None, Parameter(name=["--lines", "-n"], validator=validators.Number(gte=0))
    ] = None,
    folder: Folder = None,
) -> None:
    """Print a stage's log as it has arrived here.

    Parameters
    ----------
    stage
        A stage, or sh-<number> for a shell command.
    follow
        Go on printing what is added, until interrupted.
    lines
        Only the last so many lines; all by default, 10 with --follow.
    folder
        The shared folder's end here.
    """
    from syncd.show import print_log
    from syncd.view import check_log

    path = check_log(_layout(folder), stage)
    if follow and not path.exists():
        _note(f"{path} is not there yet; waiting for it")
    print_log(path, follow=follow, lines=10 if follow and lines is None else lines)


@app.command(
    help_epilogue=(
        "Examples:\n\n    syncd results\n    syncd results gate\n"
        "    syncd results gate.0004.7f3a --json\n    syncd results 4\n"
    )
)
def results(run: str = "", /, *, folder: Folder = None, json: Json = False) -> None:
    """Show the results of the runs, or what became of one: each attempt, and why it ended.

    Parameters
    ----------
    run
        Only the runs of this stage; or one run, by its id or its command's number, with every
        attempt, its last lines and all that it reported, also before it has ended.
    folder
        The shared folder's end here.
    json
        Print them as JSON.
    """
    from protocol.results import Results
    from syncd.account import read_account
    from syncd.show import print_account, print_record, print_results

    layout = _layout(folder)
    found = Results.load(layout.results)
    # A stage's name lists its runs; where it has none yet, its newest command tells why.
    listed = not run or any(r.stage == run for r in found.runs.values())
    account = None if listed else read_account(layout, run)
    name = account.command.run_id or run if account else run
    chosen = [r for r in found.runs.values() if name in ("", r.stage, r.run_id)]
    if run and not chosen and account is None:
        raise DataError(
            f"show run {run}",
            path=layout.results,
            why="there is no such run, and none of a stage of that name",
            hint="`syncd results` lists them.",
        )
    if json:
        shown = {r.run_id: r.to_json() for r in chosen}
        if account:
            shown[name] = shown.get(name, {}) | {"account": asdict(account)}
        _print_json(shown)
        return
    if account:
        print_account(account)
    else:
        print_results(chosen)
    for record in chosen if name in found.runs else ():
        print_record(record)


@app.command(
    help_epilogue=("Examples:\n\n    syncd demo\n    syncd demo --folder /tmp/demo --json\n")
)
def demo(
    *,
    folder: Annotated[Path, Parameter(name=["--folder", "-C"])] = Path("demo"),
    keep: Flag = False,
    json: Json = False,
) -> None:
    """Run the main job on this machine: a laptop's folder, a worker's, a remote between them.

    Builds a pool of real clips, starts `syncd watch` for each end, appends
    lines to the laptop's queue.txt, and shows how pretraining, fine-tuning,
    export and the gate come back. The exit code is 0 only if the gate judged
    the very model that this run exported.

    Parameters
    ----------
    folder
        Where to make laptop/, vm/ and remote/; what an earlier demo left there is replaced.
    keep
        Go on with what an earlier demo left there: the gate then judges against its champion.
    json
        Print what came back as JSON.
    """
    from syncd.demo import run_demo

    outcome = run_demo(folder.resolve(), keep=keep)
    if json:
        _print_json(outcome)


app.command(
    "syncd.bridge.command:bridge",
    name="bridge",
    help="""Let workers reach this folder without a cloud drive, until it is interrupted.

    Serves the objects and, read-only, serve/, to who has its password, which
    --show prints. `syncd watch` runs beside it; `syncd watch --bridge` does both.""",
    help_epilogue=(
        "Examples:\n\n    syncd bridge --tunnel cloudflared\n"
        "    syncd bridge --show\n"
        "    syncd bridge --tunnel ssh:me@host --url https://gpu.example.org\n"
        '    syncd bridge --tunnel "command:lt --port {port}"\n'
    ),
)

app.command(
    "syncd.notebook.command:bootstrap",
    name="bootstrap",
    help="""Make the cell that turns a notebook's VM into this folder's worker.

    Prints the cell and writes a notebook with it. Pasted into a fresh VM, it
    installs what is missing, starts the worker, and shows how it is. The key
    stands in neither: the cell takes it from the platform's secrets, or asks.""",
    help_epilogue=(
        "Examples:\n\n    syncd bootstrap --platform colab\n"
        "    syncd bootstrap --platform kaggle --remote drive:syncd\n"
        "    syncd bootstrap --platform colab --stop-when-idle 30m\n"
    ),
)

app.command(
    "syncd.doctor.command:doctor",
    name="doctor",
    help="""Look for what is wrong with this end: machine, folder, key, remote, daemon.

    Each check prints a line: ok, warning or wrong, what was found, what to do.
    An object is sent to the remote, read back, and removed. Works before
    `syncd init` and without a network. The exit code is 0 when nothing is
    wrong, else that of what to mend first.

    With --drill it injures a set-up on purpose, and says for each drill whether
    what must hold held: each command run once, each log whole.""",
    help_epilogue=(
        "Examples:\n\n    syncd doctor\n    syncd doctor --drill --local\n"
        "    syncd doctor --json | jq '.[] | select(.level != \"ok\")'\n"
    ),
)

app.command(
    "syncd.notebook.up:up",
    name="up",
    help="""Start a Colab session with Google's own client, and make it this folder's worker.

    The client (PyPI: google-colab-cli) has to be installed and logged in. It
    makes the session, and gives it the key and the cell that `syncd bootstrap`
    makes; all else goes through the folder, so `syncd watch` has to run. A
    session that was begun before, and is there, is found again.""",
    help_epilogue=(
        "Examples:\n\n    syncd up\n    syncd up --gpu A100 --stop-when-idle 30m\n"
        '    SYNCD_COLAB="colab --auth=adc" syncd up --no-wait\n'
    ),
)

app.command(
    "syncd.notebook.up:down",
    name="down",
    help="""End the Colab session that `syncd up` has begun, once nothing of it is needed.

    That is when every command has ended and all that the worker made was sent.
    The session's machine, and what is on it, are gone then.""",
    help_epilogue="Examples:\n\n    syncd down\n    syncd down --now\n",
)

app.command(
    "syncd.bench.command:app",
    name="bench",
    help="Measure what syncd does, beside what else could be used.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code. A fault of ours raises."""
    from syncd.show import plain_console

    tokens = sys.argv[1:] if arguments is None else arguments
    # What a console or a pipe has no character for is printed as its escape, and is no fault.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(
            tokens,
            console=plain_console(),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        sys.stdout.flush()  # here, where a reader that has gone is no fault
        return code if isinstance(code, ExitCode) else ExitCode.OK
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except CycloptsError as error:
        return _fail(f"{error}{_choices(error)}", ExitCode.USAGE)
    except BrokenPipeError:
        # The reader of our output has gone (`syncd logs pretrain | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:
            raise  # not of a place that the user gave: ours
        logging.getLogger("syncd").debug("", exc_info=True)
        told = ConfigError(
            "use a file or folder", path=error.filename, why=error.strerror or str(error)
        )
        return _fail(str(told), told.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.INTERRUPTED)
    return ExitCode.OK


def _choices(error: CycloptsError) -> str:
    """Return what an argument that is missing may be, where that is one of a few words."""
    if not isinstance(error, MissingArgumentError) or error.argument is None:
        return ""
    choices = error.argument.get_choices()
    return f" It is one of: {', '.join(choices)}." if choices else ""


def _fail(message: str, code: ExitCode) -> int:
    print(f"syncd: error: {message}", file=sys.stderr)
    return code
