"""report(): one HTML file that shows what a checkpoint is, where its bytes lie, and how it differs.

collect      names, kinds and layers of all tensors, as columns
shard_map    ranks x layers: the bytes of each cell, and the boxes in it
flow         a plan: from kinds in the source to kinds in the output, by fidelity
error_map    the errors of lossy encodings and of differing tensors: layers x projections
verdict      what it is, who wrote it, what is wrong, and the command to run
page         all of it as one file; `html` renders, `cards` shows small pieces in a notebook
"""
