"""The loader: from Arrow files to batches in pinned memory, as fast as memory can be copied.

`rows.py` opens files and says where each row lies; `sampler.py` chooses and orders rows; `plan.py`
and `batching.py` say which rows make which batch; `kernels.py` copies them; `loader.py` puts it all
together. docs/loader.md says how to use it.
"""

from trainer.loader.batch import Batch
from trainer.loader.batching import Fixed, Packed, Padded, TooLong
from trainer.loader.kernels import Kernel
from trainer.loader.loader import Loader
from trainer.loader.rows import Rows, open_rows
from trainer.loader.sampler import ByGroup, InOrder, Sampler, Shuffled

__all__ = [
    "Batch",
    "ByGroup",
    "Fixed",
    "InOrder",
    "Kernel",
    "Loader",
    "Packed",
    "Padded",
    "Rows",
    "Sampler",
    "Shuffled",
    "TooLong",
    "open_rows",
]
