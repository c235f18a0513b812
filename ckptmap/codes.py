"""The error codes: what each means and what to do, for `ckptmap explain CODE`.

1xx the source · 2xx the plan · 3xx the run · 4xx the answer · 5xx live models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One kind of error: a title, why it is raised, and the next step."""

    title: str
    why: str
    next_step: str


CODES: Mapping[str, Code] = {
    # ------------------------------------------------------------------ the source
    "CKM101": Code(
        "not readable, or not a checkpoint",
        "The path does not exist, cannot be read, or begins like no format that ckptmap knows. "
        "Formats are recognised by their structure, never by the file's name.",
        "Check the path. Known are torch.save files, safetensors files and folders, directories "
        "of torch.distributed.checkpoint, and rank files.",
    ),
    "CKM102": Code(
        "a Git LFS pointer",
        "The file is the few lines that Git keeps in place of a large file, not the file itself.",
        "git lfs pull in the repository it came from, or download the file again.",
    ),
    "CKM103": Code(
        "a web page or JSON, not weights",
        "The file is text. A download that failed often leaves its error page under the name of "
        "the file.",
        "Look at its first line, then download it again.",
    ),
    "CKM104": Code(
        "truncated",
        "The file ends before the data that its own header or index announces.",
        "Copy or download it again, or use an earlier checkpoint.",
    ),
    "CKM105": Code(
        "a damaged zip archive",
        "A torch.save file is a zip archive of uncompressed records. This one has no central "
        "directory, or records that are compressed, encrypted, repeated or out of place.",
        "Copy it again. If torch.load reads it, save it once more with torch.save.",
    ),
    "CKM106": Code(
        "an unsafe or malformed pickle",
        "The pickle in the file asks for something that building tensors does not need, or is no "
        "valid pickle. Nothing in it was called, and no option of ckptmap calls it.",
        "Do not load it by other means unless you trust where it came from; then save plain "
        "tensors in place of objects.",
    ),
    "CKM107": Code(
        "a bad safetensors header",
        "The header is no JSON object, names a dtype that does not exist, or its byte ranges "
        "overlap, leave holes, or do not fit the shapes.",
        "Copy or download the file again, or have it written again by its author.",
    ),
    "CKM108": Code(
        "a bad index of shards",
        "The *.index.json is no valid index, or disagrees with the shard files: a file is missing, "
        "a tensor lies in another file than it says, or in two.",
        "Download the folder again in full; remove shards that belong to another upload.",
    ),
    "CKM109": Code(
        "bad metadata of a distributed checkpoint",
        "The .metadata file of the directory is no metadata of torch.distributed.checkpoint, or "
        "one of a version that this release does not read.",
        "Copy the whole directory again, .metadata included; rank 0 writes it last.",
    ),
    "CKM110": Code(
        "an incomplete or mixed set of rank files",
        "A rank's file is missing, or files of different runs or world sizes lie in one folder.",
        "Copy every rank's file of one save into one folder.",
    ),
    "CKM111": Code(
        "a directory that is something else",
        "The directory is no checkpoint: it holds checkpoints, is an unfinished save, or belongs "
        "to a format that is not read.",
        "Point at the checkpoint itself; the message names those that were found.",
    ),
    "CKM112": Code(
        "parts that do not fill a tensor",
        "The stored parts of a tensor leave a hole or overlap, so some values would be missing or "
        "ambiguous.",
        "A rank's file may be missing, or be from another run; save the checkpoint again.",
    ),
    "CKM113": Code(
        "replicas that disagree",
        "Ranks hold copies of one tensor that must be equal, and shape, dtype or values differ.",
        "Find out which rank is right; the run that saved it had diverged.",
    ),
    "CKM114": Code(
        "two keys for one name",
        "Two stored keys become the same name once wrapper segments are taken off, or would be "
        "written to the same place.",
        "Leave one of them behind with --exclude, or name the dict to use with --source-root.",
    ),
    "CKM115": Code(
        "an incomplete quantized tensor",
        "The parts of a quantized tensor (codes, scales, tables) are not all there, or their "
        "shapes do not fit each other.",
        "Save it again with all its parts; codes without scales cannot be decoded.",
    ),
    "CKM116": Code(
        "a path that leaves the directory",
        "The checkpoint names a file outside its own directory, which none needs to do.",
        "Do not use it unless you know why; copy the files into one directory.",
    ),
    "CKM117": Code(
        "the torch.save format of before torch 1.6",
        "That format is a stack of pickles with raw data between them, and is not read.",
        "Load it once with torch.load and save it with a current torch.",
    ),
    # ------------------------------------------------------------------ the plan
    "CKM201": Code(
        "an unknown setup or wrapper",
        "--to takes SETUP or SETUP-ENCODING, and --wrap wrapper names; this is none of them.",
        "The message lists what there is; `ckptmap convert --help` shows examples.",
    ),
    "CKM202": Code(
        "keys that the plan cannot account for",
        "Every key of the source must be carried over or dropped by a decision of yours; these "
        "are neither. Nothing was written.",
        "`ckptmap plan` lists them, each with what to do about it.",
    ),
    "CKM203": Code(
        "a tensor that cannot be encoded so",
        "The encoding that was asked for cannot hold this tensor: its shape, its number of "
        "elements or its dtype does not fit.",
        "Leave it as it is with --no-encode, or choose another encoding.",
    ),
    "CKM204": Code(
        "a world size that does not fit",
        "--world-size is below 1, or the setup is not cut over ranks.",
        "Leave it out, or choose a setup that is cut: fsdp1, fsdp2.",
    ),
    "CKM205": Code(
        "several dicts could hold the weights",
        "The checkpoint nests several dicts of tensors, and it does not say which is the model.",
        "Name it with --source-root (for inspect: --root); the message lists the candidates.",
    ),
    "CKM206": Code(
        "nothing selected",
        "--include, --exclude and --drop leave no tensor to convert.",
        "Check the globs against `ckptmap inspect --keys GLOB`.",
    ),
    "CKM207": Code(
        "optimizer state that cannot be named",
        "The state is keyed by parameter index and the order given for it does not fit, or the "
        "key form asked for cannot hold the state.",
        "Give the parameters as they were passed to the optimizer with --param-order FILE (a name "
        "a line, an empty line between groups), or leave it behind with --optimizer drop.",
    ),
    "CKM208": Code(
        "tied, but different",
        "Two tensors are declared to be one, and their values differ: to keep one of them would "
        "lose the other.",
        "Correct the declaration (tie_word_embeddings in config.json), or the values.",
    ),
    "CKM209": Code(
        "a plan that no longer holds",
        "The source, or ckptmap, is not the one that the saved plan was made with, or the file "
        "is no plan.",
        "Plan again: ckptmap plan SRC --to SETUP -o plan.json",
    ),
    # ------------------------------------------------------------------ the run
    "CKM301": Code(
        "the destination exists",
        "Something is there already, and nothing is replaced without being told so.",
        "Choose another destination, or replace it with --overwrite.",
    ),
    "CKM302": Code(
        "source and destination overlap",
        "The destination is the source, lies in it, or holds it; the source is never written.",
        "Choose a destination elsewhere.",
    ),
    "CKM303": Code(
        "no space",
        "The disk of the destination has less room than the output needs. It was asked before "
        "the first byte.",
        "Free some space, or choose a destination on another disk.",
    ),
    "CKM304": Code(
        "no permission to write",
        "The destination's directory cannot be written.",
        "Choose a destination that can be, or mend its permissions.",
    ),
    "CKM305": Code(
        "another run is at work",
        "The same conversion into the same destination is running, here or on another machine.",
        "Wait for it. If that machine is gone, the message says what to remove.",
    ),
    "CKM306": Code(
        "a write failed",
        "The system refused a write in the middle of the run. The destination is as it was.",
        "Mend what the message says, then run the same command again: it continues.",
    ),
    "CKM307": Code(
        "interrupted",
        "The run was stopped by Ctrl-C or SIGTERM. The destination is as it was.",
        "Run the same command again: it continues.",
    ),
    "CKM308": Code(
        "the source changed",
        "A source file is not the one that was planned on, so what was read may be a mixture. "
        "Nothing was published.",
        "Convert again from a source at rest, for example when the save has finished.",
    ),
    "CKM309": Code(
        "values that cannot be encoded",
        "The tensor holds NaN or infinity, which a quantization has no code for.",
        "Find out where they come from; leave the tensor as it is with --no-encode.",
    ),
    "CKM310": Code(
        "a copy that differs",
        "Two places of the source must hold the same bytes, replicas or tied tensors, and do not. "
        "Nothing was published.",
        "Find out which is right; the run that saved it had diverged.",
    ),
    # ------------------------------------------------------------------ the answer
    "CKM401": Code(
        "verification failed",
        "What was written is not what was planned. Nothing was published.",
        "This is a defect of ckptmap, or of the disk: please report it.",
    ),
    "CKM403": Code(
        "no manifest, or one that is not read",
        "verify compares an output with the manifest that ckptmap wrote into it; there is none, "
        "or it is of another version.",
        "Compare with the source in place of it: ckptmap diff SRC DST --values",
    ),
    # ------------------------------------------------------------------ live models
    "CKM501": Code(
        "names that do not match the model",
        "The checkpoint lacks tensors of the model, or has tensors that the model does not; "
        "nothing was loaded.",
        "The message names them. strict=False loads what matches and reports the rest.",
    ),
    "CKM502": Code(
        "shapes that do not match the model",
        "A tensor has another shape in the checkpoint than in the model; nothing was loaded.",
        "Build the model from the configuration that the checkpoint was trained with.",
    ),
    "CKM503": Code(
        "a trainable quantized weight",
        "An NF4 weight has no gradient; the model's parameter asks for one.",
        "Freeze it (requires_grad_(False)) before loading, or load a dense checkpoint.",
    ),
    "CKM504": Code(
        "a quantized weight that cannot be cut",
        "The rows or scale blocks of the weight do not divide by the model's world size, and "
        "strict_encoding forbids to decode it.",
        "Load without strict_encoding, or with another world size.",
    ),
    "CKM505": Code(
        "a kind of model that cannot be loaded into",
        "The model, or the installed torch, needs something that this release does not do.",
        "The message says what; `ckptmap doctor` says what works here.",
    ),
}
