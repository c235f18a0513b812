"""Carry the files beside the weights of a Hugging Face directory: config, tokenizer, chat templates.

The output loads only with these. The config also declares which embeddings are tied.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.huggingface import tied_heads
from ckptmap.formats.safetensors.file import LFS_MAGIC
from ckptmap.protocols import CarriedFile, Declared
from ckptmap.storage.file_systems import local_copy
from ckptmap.storage.safe_names import blobs_of, inside
from ckptmap.storage.sidecar import Sidecar
from ckptmap.tensors import TensorInfo

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
TIED = "tie_word_embeddings"
OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight")
INPUT_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)
SIBLINGS = (
    "config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "modules.json", "config_sentence_transformers.json",
    "open_clip_config.json",
)  # fmt: skip
PREFIXES = ("tokenizer", "chat_template", "spiece", "sentencepiece", "sentence_")
CODE = ".py"
SUFFIXES = (CODE, ".model", ".jinja")
AUTO_MAP = b'"auto_map"'
"""transformers/dynamic_module_utils.py: what `trust_remote_code=True` is for."""
TEMPLATES = "additional_chat_templates"
"""The folder of all chat templates but the first (transformers)."""
MODULES = "modules.json"
"""sentence-transformers: the folders of modules that follow the model (pooling, dense layers), each
with a config, some with weights. Its loader needs them all."""
DIFFUSERS = {"_class_name", "_diffusers_version"}
"""Keys that only the config.json of a diffusers model has."""
DIFFUSERS_STEM = "diffusion_pytorch_model"
"""diffusers/utils/constants.py: SAFETENSORS_WEIGHTS_NAME."""
OPEN_CLIP, OPEN_CLIP_STEM = "open_clip_config.json", "open_clip_model"
"""open_clip/constants.py. Beside a config.json it describes the same model in transformers' names."""
WEIGHTS = (".safetensors", ".bin")
MAX_SIBLING_NBYTES = 256 << 20
REPAIR = "download it again, or give another with --config-from PATH"


def _belongs(file: Path) -> bool:
    """Return True for a known name. Raise SourceError CKM116 for a link out of the directory."""
    known = file.name in SIBLINGS or file.name.startswith(PREFIXES) or file.suffix in SUFFIXES
    if not known or not file.is_file() or file.stat().st_size > MAX_SIBLING_NBYTES:
        return False
    return _is_inside(file)


def _is_inside(file: Path) -> bool:
    directory = str(file.parent)
    return bool(inside(directory, file.name, directory, blobs_of(directory)))


class HfCarrier:
    """Carries siblings over and reads from config.json which embeddings are tied."""

    def ties(
        self, infos: Mapping[str, TensorInfo], siblings: Sequence[str], beside: str | None
    ) -> dict[str, str]:
        """Return output embedding -> input embedding, if config.json ties them and both are stored."""
        config = _config(_files(siblings, beside))
        text = config.get("text_config")
        texts = (config, text if isinstance(text, dict) else {})
        if not any(c.get(TIED) for c in texts):
            return {}
        outputs = [fqn for fqn in infos if fqn.endswith(OUTPUT_EMBEDDINGS)]
        inputs = [fqn for fqn in infos if fqn.endswith(INPUT_EMBEDDINGS)]
        if len(outputs) != 1 or len(inputs) != 1 or infos[outputs[0]] != infos[inputs[0]]:
            return {}
        return {outputs[0]: inputs[0]}

    def files(
        self,
        siblings: Sequence[str],
        beside: str | None,
        dtypes: Collection[str],
        quantized: Declared,
        untied: Collection[str],
    ) -> tuple[dict[str, Sidecar], list[str]]:
        """Return the files by name, with a config that fits the written weights, and notes."""
        found = _files(siblings, beside)
        carried = {name: Sidecar.at(file) for name, file in found.items()}
        notes = [f"goes along as it is: {n}" for n in found if "/" in n and n.endswith(WEIGHTS)]
        notes += [
            f"{name}: is a Git LFS pointer, not the file itself, and goes along as it is; fetch it in the"
            " source: git lfs pull"
            for name, file in carried.items()
            if file.content.startswith(LFS_MAGIC)
        ]
        if CONFIG not in carried and OPEN_CLIP in carried:
            return carried, notes
        if CONFIG not in carried:
            notes.append("no config.json is beside the weights; give one with --config-from PATH")
            return carried, notes
        content, before = carried[CONFIG].read(), _config(found)
        after = _declaring(before, dtypes, quantized, bool(untied))
        if after != before:
            content = (json.dumps(after, indent=2) + "\n").encode()
        carried[CONFIG] = Sidecar.made(content)
        quantized.check(after)
        notes += quantized.undeclared(*(_quantization(config) for config in (before, after)))
        return carried, notes

    def stem(self, carried: Mapping[str, CarriedFile]) -> str | None:
        """Return the one name of weight files that diffusers or open_clip accepts; None: any name."""
        if CONFIG not in carried:
            return OPEN_CLIP_STEM if OPEN_CLIP in carried else None
        try:
            config = json.loads(carried[CONFIG].read())
        except ValueError:  # `files` has refused it
            return None
        return DIFFUSERS_STEM if isinstance(config, dict) and config.keys() >= DIFFUSERS else None


def _files(siblings: Sequence[str], beside: str | None) -> dict[str, str]:
    """Return name -> path; `beside` is another directory to copy from, or a config file."""
    if beside is not None and Path(beside).is_dir():
        if not (Path(beside) / CONFIG).is_file():
            raise PlanError("CKM101", f"{beside}: has no config.json", "check --config-from")
        siblings = [str(file) for file in Path(beside).iterdir()]
    found = {Path(file).name: file for file in sorted(siblings) if _belongs(Path(file))}
    found |= {
        f"{TEMPLATES}/{file.name}": str(file)
        for folder in map(Path, siblings)
        if folder.name == TEMPLATES and folder.is_dir() and _is_inside(folder)
        for file in sorted(folder.iterdir())
        if _belongs(file)
    }
    found |= _of_modules(Path(found[MODULES])) if MODULES in found else {}
    if beside is not None and Path(beside).is_file():
        found[CONFIG] = beside
    code = {name for name in found if name.endswith(CODE)}
    if code and not any(map(_names_code, found.values())):
        found = {name: file for name, file in found.items() if name not in code}
    return found


def weights_of_modules(root: str) -> tuple[str, ...]:
    """Weights in the folders of modules that follow the model: tensors of no checkpoint, but part of
    what its library loads. Raises SourceError CKM116 where a folder leads out of `root`."""
    listing = Path(root) / MODULES
    found = _of_modules(listing) if _belongs(listing) else {}
    return tuple(name for name in found if "/" in name and name.endswith(WEIGHTS))


def _of_modules(listing: Path) -> dict[str, str]:
    """Return all files of the folders that it names. Raise SourceError CKM116 for a path outside."""
    directory = str(listing.parent)
    try:
        entries = json.loads(local_copy(str(listing)).read_bytes())
    except (ValueError, RecursionError):  # not that program's
        return {}
    paths = [e.get("path") for e in entries if isinstance(e, dict)] if type(entries) is list else []
    found = {}
    for path in (path for path in paths if isinstance(path, str) and path):
        for file in sorted(Path(inside(directory, path, str(listing))).rglob("*")):
            name = file.relative_to(directory).as_posix()
            if file.is_file():
                found[name] = inside(directory, name, str(listing), blobs_of(str(file.parent)))
    return found


def _names_code(file: str) -> bool:
    """Does a config say which class of a file beside it is the model's, or the tokenizer's? Other
    scripts that lie there are the user's own: a push must not upload them."""
    return file.endswith(CONFIG) and AUTO_MAP in local_copy(file).read_bytes()


def _config(files: Mapping[str, str]) -> dict[str, object]:
    if CONFIG not in files:
        return {}
    content = local_copy(files[CONFIG]).read_bytes()
    if content.startswith(LFS_MAGIC):
        raise SourceError(
            "CKM102",
            f"{files[CONFIG]}: is a Git LFS pointer ({len(content)} bytes), not the config itself",
            "fetch it: git lfs pull, or give another with --config-from PATH",
        )
    try:
        config = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise PlanError("CKM103", f"{files[CONFIG]}: is no JSON: {error}", REPAIR) from error
    return config if isinstance(config, dict) else {}


def _quantization(config: Mapping[str, object]) -> dict[str, object] | None:
    found = config.get(QUANTIZATION)
    return found if isinstance(found, dict) else None


def _declaring(
    config: Mapping[str, Any], dtypes: Collection[str], quantized: Declared, untied: bool
) -> dict[str, Any]:
    """The config with the dtype of the weights as they now are, under the names that it already
    uses, with their quantization, or none, and without a tie that is no longer one."""
    found = dict(config)
    if len(dtypes) == 1:
        found |= dict.fromkeys({"dtype", "torch_dtype"} & found.keys(), next(iter(dtypes)))
    present = found.get(QUANTIZATION)
    wanted = quantized.config(_quantization(found), tied_heads.of_config(found))
    if wanted != present:
        found.pop(QUANTIZATION, None)
        found |= {} if wanted is None else {QUANTIZATION: dict(wanted)}
    if untied:
        found[TIED] = False
        if isinstance(found.get("text_config"), dict):
            found["text_config"] = {**found["text_config"], TIED: False}
    return found
