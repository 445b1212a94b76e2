"""The loader: batches for a training loop, out of memory-mapped Arrow files, without a wait."""
