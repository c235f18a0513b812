"""Find files in the directory of an output that ckptmap did not write.

A loader may read such a file: a second set of weights, another config, code of a model. So `verify`
names it. Not named is what people and their tools put beside weights, and what no loader takes for
weights, for settings of the model or for code: a README, a license, a tokenizer, caches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ckptmap.execution import manifest as manifests
from ckptmap.storage.manifest_schema import ManifestDocument

CACHES = (".cache", "__pycache__", ".ipynb_checkpoints")
"""Names of directories that programs create for themselves; .cache is that of huggingface_hub."""
BESIDE = re.compile(
    r"README(\.md)?|LICENSE.*|NOTICE.*|USE_POLICY.*|\.git(attributes|ignore)|\.DS_Store"
    r"|\.nfs\w+|tokenizer(_config)?\.(json|model)|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|spiece\.model|sentencepiece\.[\w.]*model|chat_template\.\w+"
)
"""Matches the names of files that may lie beside the weights: texts for people, settings of git, the
files of a tokenizer. Not config.json and generation_config.json, which say how a model is built and
run, nor a name that is looked for as weights."""
KEPT_FOLDERS = (*CACHES, ".git")


def extra_files(base: Path, document: ManifestDocument) -> Iterator[str]:
    """Yield the paths of files below `base` that neither the manifest lists nor `BESIDE` matches.

    A directory without a listed file is yielded once, with a slash at its end.
    """
    listed = {manifests.NAME, *document["files"], *document["carried"]}
    parents = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
    for folder, folders, names in os.walk(base):
        here = Path(folder).relative_to(base)
        for name in sorted(names):
            path = (here / name).as_posix()
            if path not in listed and not (here == Path() and BESIDE.fullmatch(name)):
                yield path
        inside = [name for name in sorted(folders) if name not in KEPT_FOLDERS]
        folders[:] = [name for name in inside if (here / name).as_posix() in parents]
        yield from (f"{(here / name).as_posix()}/" for name in inside if name not in folders)
