"""Choose the files beside the weights of a Hugging Face directory that are copied to the output:
config, tokenizer, chat templates and the like.

transformers loads the output only with these files. `config.json` also states which embeddings are
tied, and how the weights are quantized. So it is changed to describe the weights that are written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from pathlib import Path

from ckptmap.core.json_text import parse_json, parse_object
from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.huggingface import tied_heads
from ckptmap.formats.huggingface.broken_files import missing_files, unreadable_files
from ckptmap.formats.huggingface.tied_embeddings import TIED, states_tied
from ckptmap.formats.safetensors.file import LFS_MAGIC
from ckptmap.protocols import CarriedFile, Declared
from ckptmap.protocols.file_systems import Mounts, ReadsFiles
from ckptmap.storage.json_file import read_json
from ckptmap.storage.safe_names import blobs_of, inside
from ckptmap.storage.sidecar import Sidecar
from ckptmap.tensors import TensorInfo

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
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
    "open_clip_config.json", "hf_quant_config.json",
)  # fmt: skip
FORMS = (
    "recipe.yaml", "quantize_config.json", "quant_config.json", "quantization_config.json", "quanto_qmap.json",
)  # fmt: skip
"""Files in which programs state how they quantized the weights beside them: llm-compressor; AutoGPTQ and
GPTQModel; AutoAWQ; auto-round; optimum-quanto. They are true of weights in that form alone."""
PREFIXES = ("tokenizer", "chat_template", "spiece", "sentencepiece", "sentence_")
CODE = ".py"
SUFFIXES = (CODE, ".model", ".jinja")
MODELOPT, MODELOPT_CONFIG = "modelopt", "hf_quant_config.json"
"""The `quant_method` of ModelOpt, and the file in which it states the same beside config.json."""
AUTO_MAP = b'"auto_map"'
"""The config key that names Python files beside the config, which `trust_remote_code=True` runs
(transformers/dynamic_module_utils.py)."""
TEMPLATES = "additional_chat_templates"
"""The folder in which transformers keeps all chat templates but the first."""
MODULES = "modules.json"
"""The file in which sentence-transformers lists the folders of the modules that follow the model
(pooling, dense layers). Each folder holds a config, some hold weights. Its loader needs them all."""
DIFFUSERS = {"_class_name", "_diffusers_version"}
"""Keys that only the config.json of a diffusers model has."""
DIFFUSERS_STEM = "diffusion_pytorch_model"
"""Name of the weight files that diffusers loads (diffusers/utils/constants.py,
SAFETENSORS_WEIGHTS_NAME)."""
OPEN_CLIP, OPEN_CLIP_STEM = "open_clip_config.json", "open_clip_model"
"""Config and name of the weight files of open_clip (open_clip/constants.py). If a config.json is
there too, the weights have the names of transformers."""
WEIGHTS = (".safetensors", ".bin")
MAX_SIBLING_NBYTES = 256 << 20
REPAIR = "download it again, or give another with --config-from PATH"


def _belongs(file: Path) -> bool:
    """Return True for a file that is copied, by its name and size. Raise SourceError CKM116 for a
    symbolic link out of the directory."""
    if not _is_known(file) or not file.is_file() or file.stat().st_size > MAX_SIBLING_NBYTES:
        return False
    return _is_inside(file)


def _is_known(file: Path) -> bool:
    return (
        file.name in (*SIBLINGS, *FORMS)
        or file.name.startswith(PREFIXES)
        or file.suffix in SUFFIXES
    )


def _is_wanted(path: Path, copied: Collection[str]) -> bool:
    """Whether a file would be copied from this path. A folder may be called `tokenizer`, as diffusers' are."""
    return path.name not in copied and (
        path.name == CONFIG or (_is_known(path) and not path.is_dir())
    )


def _is_inside(file: Path) -> bool:
    directory = str(file.parent)
    return bool(inside(directory, file.name, directory, blobs_of(directory)))


class HfCarrier(ReadsFiles):
    """Copies the siblings of the weights, and reads from config.json which embeddings are tied.

    siblings   paths of the files and folders beside the source's weights
    beside     the value of `--config-from`: a directory to copy from instead, or a config.json
    """

    made: Mapping[str, bytes] = {}
    """Files made of the source's own metadata, by name, for what lies not beside it, and for a config.json that states
    no sizes."""

    def with_made(self, files: Mapping[str, bytes]) -> HfCarrier:
        """Return the carrier, which uses these files where there are none of their names."""
        carrier = copy(self)
        carrier.made = files
        return carrier

    def ties(
        self, infos: Mapping[str, TensorInfo], siblings: Sequence[str], beside: str | None
    ) -> dict[str, str]:
        """Return output embedding -> input embedding, if config.json ties them and both are stored."""
        if not states_tied(self._config(self._copied(siblings, beside)[0])):
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
        """Return name -> file, with a config.json that describes the written weights, and notes.

        dtypes      dtypes of the written matrices
        quantized   the `quantization_config` that the weights need
        untied      output embeddings that are no longer tied to the input embedding
        """
        copied, bare = self._copied(siblings, beside)
        outdated = (
            [] if quantized.keeps_form else [name for name in FORMS if copied.pop(name, None)]
        )
        carried = {name: Sidecar.made(content) for name, content in self.made.items()}
        carried |= {name: Sidecar.at(file, self.mounts) for name, file in copied.items()}
        notes = [f"copied unchanged: {n}" for n in copied if "/" in n and n.endswith(WEIGHTS)]
        notes += map(_outdated, outdated)
        notes += bare
        notes += [
            f"{name}: is a Git LFS pointer, not the file itself, and is copied unchanged; fetch it in the"
            " source: git lfs pull"
            for name, file in carried.items()
            if file.content.startswith(LFS_MAGIC)
        ]
        notes += missing_files(path for path in siblings if _is_wanted(Path(path), copied))
        notes += unreadable_files(carried)
        if CONFIG not in carried and OPEN_CLIP in carried:
            return carried, notes
        if CONFIG not in carried:
            notes.append("the weights have no config.json; give one with --config-from PATH")
            return carried, notes
        content, before = carried[CONFIG].read(), self._config(copied)
        after = _declaring(before, dtypes, quantized, bool(untied))
        if after != before:
            content = (json.dumps(after, indent=2) + "\n").encode()
        carried[CONFIG] = Sidecar.made(content)
        quantized.check(after)
        method = (_quantization(after) or {}).get("quant_method")
        if MODELOPT_CONFIG in carried and method != MODELOPT:
            del carried[MODELOPT_CONFIG]
            notes.append(_outdated(MODELOPT_CONFIG))
        notes += quantized.undeclared(*(_quantization(config) for config in (before, after)))
        return carried, notes

    def _copied(
        self, siblings: Sequence[str], beside: str | None
    ) -> tuple[dict[str, str], list[str]]:
        """Return name -> path of the files to copy, and a note on a config.json that the made one goes before."""
        copied = _files(siblings, beside, self.mounts)
        replaced = beside is None and CONFIG in copied and CONFIG in self.made
        if not replaced:
            return copied, []
        from ckptmap.formats.huggingface.bare_config import is_bare  # few sources are GGUF files

        if not is_bare(_config(copied, self.mounts)):
            return copied, []
        note = f"{copied.pop(CONFIG)}: states no sizes of the model; one made of the source's own metadata takes its place"
        return copied, [note]

    def _config(self, files: Mapping[str, str]) -> dict[str, object]:
        """Return the config among the files, or the one that is made; {} where there is neither."""
        if CONFIG in files or CONFIG not in self.made:
            return _config(files, self.mounts)
        made = parse_json(self.made[CONFIG], allow_nan=True)
        return made if isinstance(made, dict) else {}

    def stem(self, carried: Mapping[str, CarriedFile]) -> str | None:
        """Return the only name of weight files that diffusers or open_clip loads; None for any name."""
        if CONFIG not in carried:
            return OPEN_CLIP_STEM if OPEN_CLIP in carried else None
        try:
            config = parse_json(carried[CONFIG].read(), allow_nan=True)
        except ValueError:  # `files` has refused it
            return None
        return DIFFUSERS_STEM if isinstance(config, dict) and config.keys() >= DIFFUSERS else None


def _outdated(name: str) -> str:
    return f"{name} is left out: it states a quantization that is no more"


def _files(siblings: Sequence[str], beside: str | None, mounts: Mounts) -> dict[str, str]:
    """Return name -> path of the files to copy. Raise PlanError CKM101 if the directory `beside` has
    no config.json."""
    if beside is not None and Path(beside).is_dir():
        if not (Path(beside) / CONFIG).is_file():
            raise PlanError(
                "CKM101",
                f"{beside}: has no config.json",
                "give a directory with one, or the file itself: --config-from PATH",
            )
        siblings = [str(file) for file in Path(beside).iterdir()]
    files = {Path(file).name: file for file in sorted(siblings) if _belongs(Path(file))}
    files |= {
        f"{TEMPLATES}/{file.name}": str(file)
        for folder in map(Path, siblings)
        if folder.name == TEMPLATES and folder.is_dir() and _is_inside(folder)
        for file in sorted(folder.iterdir())
        if _belongs(file)
    }
    files |= _of_modules(Path(files[MODULES]), mounts) if MODULES in files else {}
    if beside is not None and Path(beside).is_file():
        files[CONFIG] = beside
    code = {name for name in files if name.endswith(CODE)}
    if code and not any(_names_code(file, mounts) for file in files.values()):
        files = {name: file for name, file in files.items() if name not in code}
    return files


def weights_of_modules(root: str, mounts: Mounts) -> tuple[str, ...]:
    """Return the weight files in the folders that modules.json of `root` lists.

    sentence-transformers loads them with the model, but they are not tensors of the checkpoint.
    Raise SourceError CKM116 for a folder that leads out of `root`.
    """
    listing = Path(root) / MODULES
    files = _of_modules(listing, mounts) if _belongs(listing) else {}
    return tuple(name for name in files if "/" in name and name.endswith(WEIGHTS))


def _of_modules(listing: Path, mounts: Mounts) -> dict[str, str]:
    """Return name -> path of all files in the folders that a modules.json lists.

    Raise SourceError CKM116 for a path out of its directory."""
    directory = str(listing.parent)
    try:
        entries = read_json(listing, mounts)
    except ValueError:  # not a modules.json of sentence-transformers
        return {}
    paths = [e.get("path") for e in entries if isinstance(e, dict)] if type(entries) is list else []
    files = {}
    for path in (path for path in paths if isinstance(path, str) and path):
        for file in sorted(Path(inside(directory, path, str(listing))).rglob("*")):
            name = file.relative_to(directory).as_posix()
            if file.is_file():
                files[name] = inside(directory, name, str(listing), blobs_of(str(file.parent)))
    return files


def _names_code(file: str, mounts: Mounts) -> bool:
    """Return True for a config that names Python files beside it as code of the model or tokenizer.

    Without such a config, scripts in the directory are the user's own, and a push must not upload
    them.
    """
    return file.endswith(CONFIG) and AUTO_MAP in mounts.local_copy(file).read_bytes()


def _config(files: Mapping[str, str], mounts: Mounts) -> dict[str, object]:
    if CONFIG not in files:
        return {}
    content = mounts.local_copy(files[CONFIG]).read_bytes()
    if content.startswith(LFS_MAGIC):
        raise SourceError(
            "CKM102",
            f"{files[CONFIG]}: is a Git LFS pointer ({len(content)} bytes), not the config itself",
            "fetch it: git lfs pull, or give another with --config-from PATH",
        )
    try:
        return parse_object(content, allow_nan=True)
    except ValueError as error:
        raise PlanError(
            "CKM103", f"{files[CONFIG]}: cannot be read as JSON: {error}", REPAIR
        ) from error


def _quantization(config: Mapping[str, object]) -> dict[str, object] | None:
    settings = config.get(QUANTIZATION)
    return settings if isinstance(settings, dict) else None


def _declaring(
    config: Mapping[str, object], dtypes: Collection[str], quantized: Declared, untied: bool
) -> dict[str, object]:
    """Return the config changed to describe the written weights.

    Their dtype replaces `dtype` or `torch_dtype`, if the config has such a key. Their
    `quantization_config` replaces the present one. With `untied`, no embedding is tied any more.
    """
    changed = dict(config)
    if len(dtypes) == 1:
        changed |= dict.fromkeys({"dtype", "torch_dtype"} & changed.keys(), next(iter(dtypes)))
    present = changed.get(QUANTIZATION)
    wanted = quantized.config(_quantization(changed), tied_heads.of_config(changed))
    if wanted != present:
        changed.pop(QUANTIZATION, None)
        if wanted is not None:
            changed[QUANTIZATION] = dict(wanted)
    if untied:
        changed[TIED] = False
        inner = changed.get("text_config")
        if isinstance(inner, dict):
            changed["text_config"] = {**inner, TIED: False}
    return changed
