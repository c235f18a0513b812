"""One command for a machine with a GPU: is ckptmap right there, and how fast is it?

    make gpu                                            # on a GPU: at most 9 minutes
    python -m benchmarks.gpu_session --steps facts,equality
    python -m benchmarks.gpu_session --device cpu --size tiny     # a try of the program itself

Each step runs in a process of its own under a time limit, so that a failure, a hang or a crash of
one leaves the others alone. After each step `gpu-session.json` and `gpu-session.md` are written, so
that whoever ends the session early keeps what was measured. Figures stand beside their ratio to what
bounds them: the link between host memory and the device, or the CPU.

ckptmap need not be installed: the folder of the repository and torch are enough. What else a step
needs stands in `steps.STEPS`; a step whose library is missing is skipped and says so.
"""
