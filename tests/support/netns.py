"""Two hosts with a router between them, in network namespaces of this machine: needs root, Linux.

    with Network() as network:
        subprocess.run([*network.vm.prefix, "rclone", ...])   # a process on that host
        network.unplug()

The way between may be slow (`tc tbf`), unplugged at the VM, so that it knows that there is no way,
or lose all packets at the router, so that nobody knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from servers import WebdavServer

_numbers = count()
_CLONE_NEWNET = 0x40000000
_FORWARD = "net.ipv4.ip_forward=1"


@dataclass(frozen=True)
class Host:
    """One host: its namespace, its address, and the names of both ends of its cable."""

    namespace: str
    address: str
    gateway: str
    device: str
    port: str

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that is to run on this host."""
        # Not `ip netns exec`, which mounts another /sys.
        return ["nsenter", f"--net=/run/netns/{self.namespace}", "--"]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this thread one of that host: what it opens meanwhile stays there."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            open("/proc/thread-self/ns/net") as home,
            open(f"/run/netns/{self.namespace}") as there,
        ):
            if libc.setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                if libc.setns(home.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")


class Network:
    """A laptop and a VM. Skips the test where there can be no namespaces."""

    def __init__(self) -> None:
        mark = f"syncd-{os.getpid()}-{next(_numbers)}"
        self.router = f"{mark}-router"
        self.laptop = Host(f"{mark}-laptop", "10.231.7.1", "10.231.7.254", "cable", "to-laptop")
        self.vm = Host(f"{mark}-vm", "10.231.8.1", "10.231.8.254", "cable", "to-vm")

    def __enter__(self) -> Self:
        missing = [tool for tool in ("ip", "tc", "nsenter", "sysctl") if shutil.which(tool) is None]
        if missing:
            pytest.skip(
                f"network namespaces need {', '.join(missing)} (iproute2, util-linux, procps)"
            )
        try:
            _run("ip", "netns", "add", self.router)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        try:
            for host in (self.laptop, self.vm):
                self._join(host)
            _run("nsenter", f"--net=/run/netns/{self.router}", "sysctl", "-qw", _FORWARD)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _join(self, host: Host) -> None:
        """Make a host, and a cable from it to the router."""
        _run("ip", "netns", "add", host.namespace)
        ends = [host.device, "netns", host.namespace, "type", "veth"]
        ends += ["peer", "name", host.port, "netns", self.router]
        _run("ip", "link", "add", *ends)
        for place, device, address in (
            (host.namespace, host.device, host.address),
            (self.router, host.port, host.gateway),
        ):
            _run("ip", "-n", place, "link", "set", "lo", "up")
            _run("ip", "-n", place, "address", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", place, "link", "set", device, "up")
        self._set_route(host)

    def _set_route(self, host: Host) -> None:
        _run("ip", "-n", host.namespace, "route", "replace", "default", "via", host.gateway)

    def _remove(self) -> None:
        for namespace in (self.laptop.namespace, self.vm.namespace, self.router):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", namespace)

    def renew_vm(self) -> None:
        """Take the VM's host away, and put another one in its place: what it runs is not ended."""
        _run("ip", "netns", "delete", self.vm.namespace)
        # The cable's other end goes when the kernel comes to it.
        subprocess.run(
            ["ip", "-n", self.router, "link", "delete", self.vm.port],
            capture_output=True,
            check=False,
        )
        self.vm = replace(self.vm, namespace=f"{self.vm.namespace}-new")
        self._join(self.vm)

    def _queue(self, *words: str) -> None:
        """Have the router queue so what it passes on, each way."""
        for host in (self.laptop, self.vm):
            _run("tc", "-n", self.router, "qdisc", "replace", "dev", host.port, "root", *words)

    def limit(self, rate: str = "10mbit") -> None:
        """Let no more than `rate` pass, each way; and let all pass again that was lost."""
        self._queue("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")

    def lose_all(self) -> None:
        """Let every packet vanish at the router."""
        self._queue("blackhole")

    def unplug(self, host: Host | None = None) -> None:
        """Take the link down at a host, the VM by default: it knows that there is no way."""
        host = host or self.vm
        _run("ip", "-n", host.namespace, "link", "set", host.device, "down")

    def plug_in(self, host: Host | None = None) -> None:
        """Take it up again, and set the route that went with it."""
        host = host or self.vm
        _run("ip", "-n", host.namespace, "link", "set", host.device, "up")
        self._set_route(host)


class NetworkWebdav(WebdavServer):
    """`rclone serve webdav` on a network's laptop or, as a drive in the cloud is, between both."""

    def __init__(self, folder: Path, network: Network, *, on_laptop: bool = True) -> None:
        super().__init__(folder)
        self.host, self.prefix = network.laptop.address, network.laptop.prefix
        if not on_laptop:
            self.host = network.laptop.gateway
            self.prefix = ["nsenter", f"--net=/run/netns/{network.router}", "--"]

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self}"
        # A process's own view of the network: state 0A is LISTEN.
        table = Path(f"/proc/{self.process.pid}/net/tcp").read_text()
        return any(f":{self.port:04X} 00000000:0000 0A" in line for line in table.splitlines())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
