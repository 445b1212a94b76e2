"""The program that the stages of a crash test run: it does a little, and bears witness.

    python -I -S program.py MODE     MODE: quick, slow, flaky, bad, tree, sh

What it does is told to `$WITNESS/log`, outside of every shared folder, in lines that one write each
appends. It holds a lock for as long as it is alive, so that a second one alive of the same run is
seen by both. Modes:

    quick   three steps, a checkpoint after each, an artefact, a report
    slow    steps until `$WITNESS/go` is there
    flaky   as quick, but the first attempt on a machine fails
    bad     always fails
    tree    as slow; does not heed SIGTERM, and leaves a child in a session of its own
    sh      as quick, for an sh: line: no checkpoints
"""

import fcntl
import hashlib
import json
import os
import signal
import sys
import time

STEP_SECONDS = 0.03
SLOW_STEPS = 400
KEPT_CHECKPOINTS = 2
BIG_BYTES = 90_000  # too large to travel inside a message

RUN = os.environ["SYNCD_RUN_ID"]
ATTEMPT = os.environ["SYNCD_ATTEMPT"]
STORE = os.environ["SYNCD_STORE"]
MACHINE = os.path.basename(os.path.dirname(STORE))
WITNESS = os.environ.get("WITNESS") or sys.argv[2]


def tell(event, *details):
    """Append a line to the witnesses' log."""
    line = " ".join([event, MACHINE, RUN, ATTEMPT, *map(str, details)]) + "\n"
    fd = os.open(f"{WITNESS}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)


def hold(name):
    """Take a lock that this process holds until it is dead; tell if another one has it."""
    fd = os.open(f"{WITNESS}/locks/{MACHINE}.{name}", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        tell("doubled", name)


def publish(path, data):
    with open(path + ".tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def named_by_hash(folder, stem, data):
    """Publish data under a name that tells its hash."""
    publish(f"{folder}/{stem}-{hashlib.sha256(data).hexdigest()[:16]}.bin", data)


def checkpoints():
    names = [n for n in os.listdir(os.environ["SYNCD_CHECKPOINT_DIR"]) if n.endswith(".bin")]
    return sorted(n for n in names if n.startswith("step-"))


def save(step):
    folder = os.environ["SYNCD_CHECKPOINT_DIR"]
    named_by_hash(folder, f"step-{step:06d}", f"{RUN} at {step} ".encode() + os.urandom(300))
    tell("checkpoint", step)
    for old in checkpoints()[:-KEPT_CHECKPOINTS]:
        os.unlink(f"{folder}/{old}")


def run_steps(steps, *, saved_every):
    """Do steps from the newest checkpoint on; return the last."""
    found = checkpoints() if saved_every else []
    step = int(found[-1].split("-")[1]) if found else 0
    tell("resume", step)
    while step < steps and not (steps == SLOW_STEPS and os.path.exists(f"{WITNESS}/go")):
        step += 1
        print(f"line {RUN} {ATTEMPT} {step}", flush=True)
        publish(os.environ["SYNCD_PROGRESS_FILE"], json.dumps({"step": step}).encode())
        if saved_every and step % saved_every == 0:
            save(step)
        time.sleep(STEP_SECONDS)
    return step


def word(name):
    """The version that a file of the payload tells."""
    with open(f"{os.environ['SYNCD_PAYLOAD']}/{name}.txt") as file:
        return file.read().strip()


def leave_a_child():
    """Start a process that heeds nothing, in a session of its own, and is no child of ours."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hold(f"{RUN}.child")
        time.sleep(3600)
    os._exit(0)


def finish():
    folder = os.environ["SYNCD_ARTIFACT_DIR"]
    named_by_hash(folder, f"small-{ATTEMPT}", os.urandom(500))
    named_by_hash(folder, f"big-{ATTEMPT}", os.urandom(BIG_BYTES))
    with open(f"{folder}/metrics.jsonl", "a") as file:
        file.write(json.dumps({"attempt": int(ATTEMPT)}) + "\n")
    stage = os.environ["SYNCD_STAGE"]
    report = {"run_id": RUN, "stage": stage, "metrics": {"attempt": int(ATTEMPT)}}
    publish(os.environ["SYNCD_RESULT_FILE"], json.dumps(report).encode())


def main(mode):
    hold(RUN)
    tell("start", *([] if mode == "sh" else [word("a"), word("b")]))
    if mode == "tree":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leave_a_child()
    steps = {"slow": SLOW_STEPS, "tree": SLOW_STEPS}.get(mode, 3)
    run_steps(steps, saved_every={"sh": 0, "slow": 5, "tree": 5}.get(mode, 1))
    code = {"bad": 3, "flaky": 7 if ATTEMPT == "1" else 0}.get(mode, 0)
    if code == 0 and mode != "sh":
        finish()
    tell("end", code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
