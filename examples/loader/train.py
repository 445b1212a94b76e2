"""An ordinary training loop over Arrow files of tokens, that goes on where it was interrupted.

    python examples/loader/train.py runs/loader

The first time it writes a small corpus beside its checkpoint: texts in which each token tells much
about the next. Any folder of Arrow files with a column of token lists would do.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from trainer.loader import Loader, Packed, open_rows

VOCABULARY, EPOCHS = 64, 3


def write_corpus(path: Path) -> None:
    """Write 2,000 texts of 16 to 512 tokens: 7 of 8 times a token is the one before, plus one."""
    drawn = np.random.default_rng(0)
    steps = [np.where(drawn.random(n) < 7 / 8, 1, 5) for n in drawn.integers(16, 513, 2000)]
    texts = [np.cumsum(each, dtype=np.int64) % VOCABULARY for each in steps]
    table = pa.table({"tokens": pa.array(texts, pa.list_(pa.int64()))})
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def main(folder: Path) -> float:
    """Train, and return the last loss."""
    corpus, saved = folder / "corpus.arrow", folder / "checkpoint.pt"
    if not corpus.exists():
        write_corpus(corpus)
    torch.manual_seed(0)
    model = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = Loader(open_rows(corpus), Packed(budget=8192), seed=1)
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        loader.load_state_dict(state["loader"])

    loss = torch.tensor(float("nan"))
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            tokens = batch["tokens"]
            follows = torch.ones(len(tokens) - 1, dtype=torch.bool)
            follows[batch.boundaries[1:-1].long() - 1] = False  # the next text's first token
            logits = model(tokens[:-1][follows])
            loss = torch.nn.functional.cross_entropy(logits, tokens[1:][follows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
        torch.save({**state, "loader": loader.state_dict()}, saved)
        print(f"epoch {loader.epoch}: loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/loader"))
