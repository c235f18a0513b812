"""List the functions and modules that a pickle names only to attack the program that loads it.

The reader never calls what a pickle names, listed here or not. The list only decides which pickles
are refused with an error. A name that is not listed becomes an inert object.
"""

from __future__ import annotations

_DANGEROUS_MODULES = frozenset({
    "os", "posix", "nt", "subprocess", "_posixsubprocess", "sys", "runpy", "importlib", "imp",
    "pkgutil", "shutil", "socket", "ctypes", "_ctypes", "cffi", "pty", "pickle", "_pickle",
    "cPickle", "dill", "cloudpickle", "joblib", "marshal", "codeop", "timeit", "pdb", "bdb",
    "cProfile", "webbrowser", "multiprocessing", "commands", "popen2", "pip", "setuptools",
    "distutils", "zipimport",
})  # fmt: skip
_DANGEROUS_BUILTINS = frozenset({
    "eval", "exec", "execfile", "compile", "__import__", "open", "input", "raw_input",
    "breakpoint", "globals", "locals", "setattr", "delattr", "apply", "reload",
})  # fmt: skip
_DANGEROUS_FUNCTIONS = frozenset({
    "torch.load", "torch.hub", "torch.jit.load", "torch.serialization.load",
    "torch.storage._load_from_bytes", "torch.package", "torch.utils.cpp_extension",
    "torch.ops.load_library", "torch.classes.load_library", "torch.export.load",
    "torch.utils.data.datapipes.utils.decoder", "torch.utils._config_module.load_config",
    "numpy.load", "numpy.fromfile", "numpy.loadtxt", "numpy.memmap", "numpy.ctypeslib",
    "numpy.lib.npyio.load", "numpy.f2py", "numpy.testing", "numpy.distutils",
    "pandas.read_pickle", "pandas.eval", "yaml.load", "yaml.unsafe_load", "operator.attrgetter",
    "operator.methodcaller", "functools.reduce", "io.open", "io.FileIO", "_io.open", "_io.FileIO",
    "codecs.open",
})  # fmt: skip


class Refused(Exception):
    """Raised for a pickle that names something on the list; its text is the name."""


def refuse_dangerous(module: str, name: str) -> None:
    """Raise Refused for a name on the list. Its text is the full name, and for the modules that `os`
    takes its functions from the usual name too: "os.system (as posix.system)"."""
    full = f"{module}.{name}"
    builtin = module in ("builtins", "__builtin__", "__builtins__")
    parts = full.split(".")
    if (
        parts[0] in _DANGEROUS_MODULES
        or (builtin and parts[1] in _DANGEROUS_BUILTINS)
        or any(".".join(parts[:n]) in _DANGEROUS_FUNCTIONS for n in range(2, len(parts) + 1))
        or any(part in _DANGEROUS_MODULES for part in name.split(".")[:-1])
    ):
        if module in ("posix", "nt"):
            raise Refused(f"os.{name} (as {full})")
        raise Refused(full)
