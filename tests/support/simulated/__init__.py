"""A device in the place of a GPU: the CPU computes at once, and what the order of events does not guarantee is told.

    streams    streams, events and a module as `torch.cuda` has them; each has a vector clock
    memory     tensors that are on the device, pinned memory, and who has read and written which bytes when
    kernels    every operation of torch on such tensors, as launched on the current stream

It needs no GPU, and finds a missing wait whatever the timing: two accesses to the same bytes, of which one is a write,
must be ordered by streams, events or waits of the host. This is how torch.cuda._sanitizer looks for races between
streams; here the host's accesses to pinned memory count, too:

    copy to the host    the bytes come when the host has waited for them, and not before
    copy from the host  the bytes must be as they were when the host has waited
    memory freed        must not be in use by another stream when its own stream takes it again

Torch knows the device as "sim" (`PrivateUse1`), one for a process, until the process ends: so tests use it in processes
of their own (see `runs`). What it cannot tell: whether host threads synchronize with each other, and what CUDA computes.
"""
