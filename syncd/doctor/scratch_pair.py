"""The scene of `--local`: both ends on this machine, in a scratch folder, and a server between.

The controller has the server's folder on its disk, as with `syncd bridge`; the worker comes by
HTTP, through a proxy that can be cut.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.wire import Role
from syncd.bench.server import serve_webdav
from syncd.bench.slow_link import SlowLink
from syncd.doctor.drills import STAGE
from syncd.doctor.scene import Scene
from syncd.platform import KILL, Identity, check_worker_system
from syncd.setup import initialise
from syncd.stages.process_tree import with_variable
from syncd.watching import Watch

STAGES = f"""\
[stages.{STAGE}]
# The first attempt goes on for ever: it ends with the machine, or with the drill.
command = "if [ $SYNCD_ATTEMPT = 1 ]; then sleep 3600; else echo $SYNCD_RUN_ID; fi"
gpu = 0
"""


@dataclass
class _Machines:
    """The scratch folder, and the worker's machines in it, one after the other."""

    folder: Path
    remote: str
    scene: Scene
    made: list[Watch] = field(default_factory=list)

    def replace(self) -> None:
        """Start a worker on an empty disk."""
        layout = Layout(self.folder / f"vm{len(self.made) + 1}")
        key = self.scene.layout.key
        initialise(layout, role=Role.WORKER, remote=self.remote, key_file=key)
        watch = Watch(layout, layout.root.with_suffix(".log"))
        self.made.append(watch)
        self.scene.worker = watch
        watch.start()

    def lose(self) -> None:
        """Take the worker's machine away: every process at once, and the disk."""
        watch = self.made[-1]
        watch.kill()
        self.end_stages(watch.layout)
        shutil.rmtree(watch.layout.root)

    def end_stages(self, layout: Layout) -> None:
        """Kill a worker's supervisors and stages, until none is left."""

        def none_left() -> bool:
            left = list(_stages_of(layout))
            for process in left:
                process.signal(KILL)
            return not left

        self.scene.until(none_left, "the end of the worker's processes")


def _stages_of(layout: Layout) -> Iterator[Identity]:
    """Yield a worker's supervisors, and what they have started."""
    runs = f"{layout.runs}/"
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or ()
        supervises = any(word.startswith(runs) for word in command)
        if supervises and (identity := Identity.of(process.pid)):
            yield identity
    for identity, value in with_variable(b"SYNCD_SUPERVISED"):
        if value.startswith(runs.encode()):
            yield identity


@contextlib.contextmanager
def scratch_pair(*, tell: Callable[[str], None] = lambda what: None) -> Iterator[Scene]:
    """Make both ends in a scratch folder, which is removed afterwards, and start their daemons.

    Raises ConfigError where no worker can run.
    """
    check_worker_system()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="syncd-drill-")))
        remote, laptop = folder / "remote", Layout(folder / "laptop")
        for each in (remote, laptop.serve):
            make_dirs(each)
        publish_bytes(laptop.serve / "stages.toml", STAGES.encode("utf-8"))
        initialise(laptop, role=Role.CONTROLLER, remote=str(remote))
        server = stack.enter_context(serve_webdav(remote, folder / "cache"))
        link = stack.enter_context(SlowLink(server.port))
        scene = Scene(Watch(laptop, folder / "laptop.log"), tell=tell)
        machines = _Machines(folder, server.url(link.port), scene)
        stack.callback(_end, scene, machines)
        scene.watch.start()
        machines.replace()

        def cut() -> None:
            link.refuse()
            link.reset_all()

        scene.cut, scene.mend = cut, link.accept
        scene.lose, scene.replace = machines.lose, machines.replace
        yield scene


def _end(scene: Scene, machines: _Machines) -> None:
    for watch in (scene.watch, *machines.made):
        watch.kill()
    for watch in machines.made:
        machines.end_stages(watch.layout)
