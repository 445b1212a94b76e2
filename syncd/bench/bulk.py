"""Much at a time: a large file each way, many small ones, a burst of objects.

A large file is compared with `rclone copy` of the same file through the same server. Our way has
more in it: each byte is hashed before it is sent and again before it is believed, a file is put
together from chunks that lie on the remote meanwhile, and it is fsynced before it is announced.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from protocol.bench import Figure
from protocol.publish import make_dirs
from syncd.bench.baselines import config_file, rclone, transfer_seconds
from syncd.bench.place import WORLD, Place
from syncd.bench.programs import program
from syncd.bench.samples import p50, size_text
from syncd.bench.server import PATIENCE, ROUND_TRIP, Server, serve_webdav
from syncd.bench.slow_link import SlowLink
from syncd.bench.world import Route
from syncd.bridge.server import LEAN
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote

BURST = 20
BURST_BYTES = 1024
FILE_BYTES = (200, 2000)
TREE = "tree"
LARGE = "large.bin"
NOTHING = {"nothing": ["true"]}  # a payload must have a stage
# What makes rclone quickest with one large file over webdav, and with many small ones.
BEST_LARGE = ("--ignore-checksum", "--no-check-dest")
BEST_SMALL = ("--transfers", "32", "--checkers", "32", "--ignore-checksum", "--no-check-dest")
BULK_SECONDS = 10 * PATIENCE


# A large file


def large_up(place: Place) -> list[Figure]:
    """A worker's artefact of a GiB: from the moment it is there to its place at the laptop."""
    size = place.scale.large_file
    source = random_file(place.folder / LARGE, size)
    mark = place.folder / WORLD / "marks" / "made"
    with place.world(Route.NEAR, {"make": program("artifact", source, mark)}) as built:
        place.say(f"{size_text(size)} from the worker to the laptop")
        built.append("run:make")
        inbox = built.laptop.layout.artifacts
        built.until(
            lambda: any(p.stat().st_size == size for p in inbox.glob(f"*/{LARGE}")),
            "the artefact",
            seconds=BULK_SECONDS,
        )
        took = time.time() - int(mark.read_text()) / 1e9
    return _against_copy(place, f"{size_text(size)} up", size, took, up=True)


def large_down(place: Place) -> list[Figure]:
    """A file of a GiB comes into serve/: from that moment to its place in the worker's payload."""
    size = place.scale.large_file
    source = random_file(place.folder / LARGE, size)
    with place.world(Route.NEAR, NOTHING) as built:
        place.say(f"{size_text(size)} from the laptop to the worker")
        arrived = built.worker.layout.serve / LARGE
        began = time.monotonic()
        source.rename(built.laptop.layout.serve / LARGE)
        built.until(
            lambda: arrived.exists() and arrived.stat().st_size == size,
            "the served file",
            seconds=BULK_SECONDS,
        )
        took = time.monotonic() - began
    return _against_copy(place, f"{size_text(size)} down", size, took, up=False)


def random_file(path: Path, size: int) -> Path:
    """Write a file of random bytes, and return its path."""
    make_dirs(path.parent)
    drawn = random.Random(size)
    with open(path, "wb") as file:
        while (left := size - file.tell()) > 0:
            file.write(drawn.randbytes(min(left, 1 << 22)))
        os.fsync(file.fileno())
    return path


def _against_copy(place: Place, name: str, size: int, took: float, *, up: bool) -> list[Figure]:
    """Return our speed against that of rclone copy by its defaults; beside it, at its best."""
    place.say("baseline: rclone copy")
    default, durable = _copy_seconds(place, size, (), (), up=up)
    best, _ = _copy_seconds(place, size, BEST_LARGE, LEAN, up=up)
    mib = size / (1 << 20)
    return [
        Figure(
            name=f"{name} on loopback, speed against rclone copy",
            value=default / took,
            unit="ratio",
            goal=">= 0.8",
        ),
        Figure(
            name=f"{name} on loopback, speed against rclone copy and one fsync of its file",
            value=durable / took,
            unit="ratio",
        ),
        *Figure(name=f"{name} on loopback", value=mib / took, unit="MiB/s").beside(
            {
                "rclone copy": mib / default,
                "rclone copy, best settings": mib / best,
                "rclone copy and one fsync": mib / durable,
            }
        ),
    ]


def _copy_seconds(
    place: Place, size: int, options: Sequence[str], server_flags: Sequence[str], *, up: bool
) -> tuple[float, float]:
    """Seconds that rclone takes for one file, on a server and a disk that have not seen it, and
    until it is durable as well, as ours is before it is announced."""
    folder = place.folder / "copy"
    served, near = folder / "served", folder / "near"
    make_dirs(served)
    make_dirs(near)
    random_file((near if up else served) / LARGE, size)
    ends: tuple[Path | str, str | Path] = (near, "there:") if up else ("there:", near)
    try:
        with serve_webdav(served, folder / "cache", server_flags) as server:
            config = config_file(folder / "rclone.conf", server.section(server.port))
            took = rclone(config, "copy", *ends, *options, check=True)
            began = time.monotonic()
            with open((served if up else near) / LARGE, "rb") as copied:
                os.fsync(copied.fileno())
            return took, took + time.monotonic() - began
    finally:
        shutil.rmtree(folder)


# Many small files


def many_files(place: Place) -> list[Figure]:
    """Many small files come into serve/ at once; until all are in the worker's payload."""
    count = place.scale.served_files
    tree = make_tree(place.folder / TREE, count)
    with place.world(Route.NEAR, NOTHING) as built:
        place.say(f"{count} files from the laptop to the worker")
        arrived = built.worker.layout.serve / TREE
        began = time.monotonic()
        tree.rename(built.laptop.layout.serve / TREE)
        built.until(arrived.exists, "the payload with the tree", seconds=BULK_SECONDS)
        took = time.monotonic() - began
        found = count_files(arrived)
    seconds = {
        name: _tree_seconds(place, count, options)
        for name, options in {"rclone copy": (), "rclone copy, best settings": BEST_SMALL}.items()
    }
    name = f"{count} files in serve/"
    return [
        Figure(name=f"{name}: arrived of them", value=found / count, unit="ratio", goal=">= 1"),
        Figure(
            name=f"{name}: time against rclone copy",
            value=took / seconds["rclone copy"],
            unit="ratio",
            goal="<= 2",
        ),
        *Figure(name=f"{name}: time", value=took, unit="s").beside(seconds),
    ]


def make_tree(folder: Path, count: int) -> Path:
    """Write `count` small, different files, a hundred to a folder."""
    drawn = random.Random(count)
    for number in range(count):
        place = folder / f"{number // 100:04d}"
        if number % 100 == 0:
            place.mkdir(parents=True)
        text = f"clip {number} " + drawn.randbytes(drawn.randrange(*FILE_BYTES) // 2).hex()
        (place / f"{number:06d}.json").write_text(text)
    return folder


def count_files(folder: Path) -> int:
    """Return how many files are below a folder."""
    return sum(len(files) for _, _, files in os.walk(folder))


def _tree_seconds(place: Place, count: int, options: Sequence[str]) -> float:
    place.say(f"baseline: rclone copy {' '.join(options)}")
    folder = place.folder / "copy"
    make_tree(folder / "served" / TREE, count)
    try:
        with serve_webdav(folder / "served", folder / "cache") as server:
            config = config_file(folder / "rclone.conf", server.section(server.port))
            return rclone(config, "copy", "there:", folder / "near", *options, check=True)
    finally:
        shutil.rmtree(folder)


# A burst


def burst(place: Place) -> list[Figure]:
    """Uploads of small objects side by side, by what the link uploads with, 50 ms away."""
    folder = place.folder
    sources = random_sources(folder / "small")
    served = folder / "served"
    make_dirs(served)
    with (
        serve_webdav(served, folder / "cache") as server,
        SlowLink(server.port, round_trip=ROUND_TRIP) as link,
        Rclone(folder / "rcd") as ours,
    ):
        remote = RcloneRemote(ours, server.url(link.port))
        values = [burst_seconds(remote, sources, f"burst{n}") for n in range(place.scale.bursts)]
        baselines = _burst_baselines(place, server, link, sources)
    name = f"{BURST} objects of 1 KiB uploaded side by side, p50 of {len(values)}"
    return Figure(name=name, value=p50(values), unit="s", goal="<= 0.6").beside(baselines)


def random_sources(folder: Path) -> list[Path]:
    """Write the files that a burst uploads."""
    return [random_file(folder / f"{k:02d}", BURST_BYTES) for k in range(BURST)]


def burst_seconds(remote: RcloneRemote, sources: Sequence[Path], folder: str) -> float:
    """Upload files side by side into a folder; return the seconds until the last is there."""
    threads = [
        threading.Thread(target=remote.upload, args=(source, f"{folder}/{source.name}"))
        for source in sources
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    there = {entry.name for entry in remote.list(folder)}
    if there != {source.name for source in sources}:
        raise RuntimeError(f"only {len(there)} of {len(sources)} objects arrived")
    return took


def _burst_baselines(
    place: Place, server: Server, link: SlowLink, sources: Sequence[Path]
) -> Mapping[str, float]:
    place.say("baseline: rclone copy, and one PUT after another")
    config = config_file(place.folder / "rclone.conf", server.section(link.port))
    copied = [
        rclone(config, "copy", sources[0].parent, f"there:copy{n}", check=True)
        for n in range(place.scale.bursts)
    ]
    one = transfer_seconds(server, link.port, "put", body=sources[0].read_bytes(), count=BURST)
    return {"rclone copy": p50(copied), "one PUT after another (old system)": sum(one)}
