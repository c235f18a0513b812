"""The error codes: what each means and what to do, for `ckptmap explain CODE`.

1xx the source · 2xx the plan · 3xx the run · 4xx the answer · 5xx live models · 7xx the Hub.
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
        "a web page or other text in place of the file",
        "The file is text where weights were expected, or no JSON where that was (config.json, "
        "params.json). A download that failed often leaves its error page under the name of the file.",
        "Look at its first line, then download it again.",
    ),
    "CKM104": Code(
        "truncated",
        "The file ends before the data that its own header or index announces.",
        "Copy or download it again, or use an earlier checkpoint.",
    ),
    "CKM105": Code(
        "a zip that is damaged, or not of torch.save",
        "A torch.save file is a zip archive of uncompressed records. This one has no central "
        "directory, or records that are compressed, encrypted, repeated, out of place or other than "
        "their checksum says; or it is a zip of other files.",
        "Unpack what was packed; else copy it again. If torch.load reads it, torch.save it once more.",
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
        "a tensor lies in another file than it says, or in two; or the weights of another save lie "
        "beside it in one file.",
        "Download the folder again in full; remove shards that belong to another upload.",
    ),
    "CKM109": Code(
        "bad metadata of a distributed checkpoint",
        "The .metadata file of the directory is empty, no metadata of torch.distributed.checkpoint, "
        "of a version that this release does not read, or names data files that are not there.",
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
        "ambiguous; or they are flat shards of FSDP1, which do not say what shapes they fill.",
        "For flat shards give --like PATH, a checkpoint or config.json of the same model. Else a "
        "rank's file may be missing, or be from another run: save the checkpoint again.",
    ),
    "CKM113": Code(
        "replicas that disagree",
        "Ranks hold copies of one tensor that must be equal, and shape, dtype or values differ.",
        "Find out which rank is right; the run that saved it had diverged.",
    ),
    "CKM114": Code(
        "two keys for one name",
        "Two stored keys become the same name once wrapper segments are taken off, or would be "
        "written to the same place, or a name would not be told from a wrapper's.",
        "Rename or delete one of them where it was saved; what a plan refuses can be left behind with "
        "--exclude, or go elsewhere with --root.",
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
    "CKM118": Code(
        "a tensor of model parallelism whose cut is not known",
        "Each rank's file holds a part of the tensor, and the files do not say along which dim it "
        "was cut. That is known by name, of the models that the message lists.",
        "Convert the checkpoint in another form, or join it with the framework that wrote it.",
    ),
    # ------------------------------------------------------------------ the plan
    "CKM201": Code(
        "an unknown setup, wrapper, key form or way of cutting",
        "--to takes SETUP or SETUP-ENCODING, --wrap names of wrappers, --optimizer-keys a key form, and "
        "--tp-plan a file of patterns and styles; this is none of them.",
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
        "a cut that does not fit",
        "--world-size, --mesh, --tp-plan or --fsdp-units do not fit the setup, which may not be cut over "
        "ranks, or each other.",
        "Leave out what the message names, or choose a setup that is cut: fsdp1, fsdp2.",
    ),
    "CKM205": Code(
        "several dicts could hold the weights",
        "The checkpoint nests several dicts of tensors, and it does not say which is the model; or "
        "--root names a place that would not be read as the weights'.",
        "Name it with --source-root; the message lists the candidates.",
    ),
    "CKM206": Code(
        "no weights, or none selected",
        "The checkpoint holds no model weights (an optimizer's state, one bare tensor, a pickled "
        "object), or --include, --exclude and --drop leave none of them to convert.",
        "Name the checkpoint that holds the weights; or check the globs against "
        "`ckptmap inspect PATH --keys GLOB`.",
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
        "is no plan, or was edited: what a plan does is said by its options alone. Under torchrun: "
        "ranks see different sources, or run different releases.",
        "Plan again: ckptmap plan SRC --to SETUP -o plan.json",
    ),
    "CKM210": Code(
        "a device that is not here",
        "Arithmetic was to run on a device that this machine, or this build of PyTorch, does not "
        "have, or that holds no values.",
        "See what there is with: ckptmap doctor; the bytes are the same with --device cpu.",
    ),
    "CKM211": Code(
        "a library that is not installed, or cannot be imported",
        "The command line reads headers and moves bytes without PyTorch; arithmetic needs it, digests "
        "need xxhash, and the Hub needs huggingface_hub. The destination is as it was.",
        "Install the library that the message names; `ckptmap doctor` lists what is here.",
    ),
    # ------------------------------------------------------------------ the run
    "CKM301": Code(
        "the destination exists",
        "Something is there already, and nothing is replaced without being told so. --overwrite "
        "replaces a checkpoint and what frameworks keep beside it (config, tokenizer, README.md); not a "
        "directory that only has one inside, nor one with other checkpoints or files of yours in it.",
        "Choose another destination, move what is yours elsewhere, or replace it with --overwrite.",
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
        "The destination or its directory cannot be written, or is what is never replaced: a link, a "
        "device, a mount point.",
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
        "The run was stopped by Ctrl-C or SIGTERM; or under torchrun a rank died, hung or never came. "
        "The destination is as it was.",
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
        "The tensor holds NaN or infinity, which a quantization has no code for, or values or scales "
        "beyond the largest of the dtype that was asked for.",
        "Find out where they come from; cast to a wider dtype (-bf16, -fp32), or leave the tensor as it "
        "is with --no-encode.",
    ),
    "CKM310": Code(
        "a copy that differs",
        "Two places of the source must hold the same bytes, replicas or tied tensors, and do not. "
        "Nothing was published, or loaded.",
        "Find out which is right: the run that saved it had diverged, or its ranks gave one name to "
        "different tensors, such as experts of their own.",
    ),
    "CKM311": Code(
        "scales too coarse for their outliers",
        "Scales of blocks are stored in 8 bits with a common step; outliers make it so coarse that "
        "other blocks would become zero or change their sign. Nothing was published.",
        "Keep the scales exactly with --exact-scales.",
    ),
    "CKM312": Code(
        "a base that does not fit",
        "--base gives quantization scales to payloads that were saved without them, and this one "
        "has none for them, or packed weights of another size.",
        "Give the quantized checkpoint that the model was loaded from before training.",
    ),
    "CKM313": Code(
        "a limit of this process",
        "The process may not have more of something: open files (ulimit -n), bytes in a file "
        "(ulimit -f), memory (ulimit -v, a container's), threads (ulimit -u). The destination is as "
        "it was.",
        "Raise the limit that the message names, or ask for less with --threads 1 and a smaller "
        "--max-memory; then run the same command again.",
    ),
    "CKM315": Code(
        "zero points where none were expected",
        "Codes were to be kept, but the tensor was quantized asymmetrically: its zero points are "
        "not all 0, which is known only once they are read. Such codes mean something else on a grid "
        "without zero points.",
        "Decode it first (--to hf-bf16), then quantize; or leave it as it is with --no-encode.",
    ),
    "CKM316": Code(
        "a weight in the order of a GPU kernel",
        "bitsandbytes 0.38 to 0.44 could save LLM.int8 weights as the tiles of the kernel of one "
        "kind of GPU (col32, turing, ampere) and not by rows. Current releases refuse them, too.",
        "Load and save it again with such a release on such a GPU: it saves rows.",
    ),
    "CKM317": Code(
        "no live model can hold this",
        "The setup's models cannot hold weights in this encoding, with stock libraries or through "
        "ckptmap.load: FSDP1, for one, cannot flatten integer tensors.",
        "Take the nearest target that the message names; `ckptmap doctor --to SETUP` has the table.",
    ),
    "CKM318": Code(
        "a BOOL that is neither 0 nor 1",
        "A byte of a BOOL tensor is another number. torch takes it for True, other readers may not, "
        "so it is not passed on.",
        "Load it and save tensor.clone(), in which torch writes 1; or leave it out with --exclude.",
    ),
    "CKM320": Code(
        "an adapter that cannot be merged",
        "A LoRA adapter is its tensors and adapter_config.json, which says how much they add. This "
        "one has no config, is of another kind than LoRA, or of a variant whose merge is no sum of "
        "the base and a product.",
        "Give the directory that peft's save_pretrained wrote, or its config with --adapter-config.",
    ),
    "CKM321": Code(
        "an adapter for another base",
        "The adapter changes a weight that the base does not have under that name. Leaving it out "
        "would give a model that nobody trained.",
        "Give the base that the adapter was trained on: adapter_config.json names it.",
    ),
    "CKM322": Code(
        "parts of an adapter that do not fit",
        "One of the two halves of a low-rank change is missing, or shapes disagree with the rank in "
        "the config or with the base's weight.",
        "Save the adapter again, whole and gathered from its ranks, with its adapter_config.json.",
    ),
    "CKM323": Code(
        "a merge that the grid would undo",
        "The base is quantized, and what an adapter adds can be smaller than the steps of that grid: "
        "quantized again, little of it may survive, and nothing in the file would say so. The message "
        "has what a sample of the weights shows.",
        "Merge into bf16 (--to hf-bf16). With --force the merge is done, and says how much survived.",
    ),
    "CKM324": Code(
        "a merge that is not finite",
        "A merged weight came out as NaN or infinity: the adapter or the base holds such values, or "
        "the base's dtype is too narrow for the sum. Nothing was published.",
        "Find out which of the two holds them; --to hf-fp32 tells whether the dtype is the reason.",
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
        "it is damaged, or it is of another version.",
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
        "a tensor that cannot be cut so",
        "Of a live model: the rows or scale blocks of a quantized weight do not divide by the model's "
        "world size, and strict_encoding, or its NF4 parameter, forbids to decode it. Of --to "
        "fsdp1-local: the tensors of an FSDP unit, or their optimizer state, do not make one flat "
        "parameter, or nothing tells their order.",
        "Load without strict_encoding, or with another world size; of fsdp1-local the message says "
        "which of --like, --fsdp-units, --use-orig-params and --optimizer drop helps.",
    ),
    "CKM505": Code(
        "a kind of model that cannot be loaded into",
        "The model, or the installed torch, needs something that this release does not do.",
        "The message says what; `ckptmap doctor` says what works here.",
    ),
    "CKM506": Code(
        "optimizer state that does not match",
        "The checkpoint has no optimizer state that can be named, or lacks that of a parameter, or "
        "has that of parameters which the optimizer does not hold; nothing was loaded.",
        "strict=False loads what matches and reports the rest; without an optimizer, load takes "
        "the weights alone.",
    ),
    "CKM507": Code(
        "no exact continuation",
        "exact=True asks for training that goes on bit for bit, and something that decides it is "
        "not as it was: world size, mesh, flags of the optimizer, compile mode, versions, a dtype.",
        "Set what the message names as it was, or load without exact=True.",
    ),
    "CKM508": Code(
        "an optimizer or scheduler that cannot be saved or loaded",
        "An optimizer's parameters are not the model's, or it keeps state in a way that is not known; or "
        "a scheduler is not of the kind that was saved.",
        "Build the optimizer after wrapping the model, from the model's own parameters; build the "
        "scheduler that was saved, or load without one.",
    ),
    "CKM509": Code(
        "replicas that differ",
        "Ranks that should hold the same values do not, so that there is no one value to save. "
        "Stochastic rounding with other random streams on each replica does this, and groups of ranks "
        "that each have weights of their own under one name. Of a load: ranks were given different "
        "checkpoints.",
        "Find out since when; save(..., replicas='first') keeps those of the lowest rank.",
    ),
    "CKM510": Code(
        "parts of ranks that make no whole tensor",
        "What all ranks hold of a tensor leaves a gap, overlaps, or has different shapes.",
        "Every rank that holds a part of the model must call save, with the same model.",
    ),
    "CKM511": Code(
        "random streams that cannot be restored",
        "None are recorded for this rank and world size, or they are of another torch.",
        "Load with random='fresh' or random='leave'.",
    ),
    "CKM512": Code(
        "an NF4 weight that bitsandbytes cannot hold here",
        "nf4='bnb' needs bitsandbytes' Linear4bit modules, whole on each rank.",
        "Replace the linear layers by bitsandbytes.nn.Linear4bit before loading.",
    ),
    "CKM513": Code(
        "live tensors that cannot be exchanged",
        "Tensors of a live state dict move between ranks by a plan that every rank makes alike; "
        "here the plans differ, or nobody holds a part that is wanted.",
        "Run the same release of ckptmap on every rank, and pass every rank's part.",
    ),
    "CKM514": Code(
        "an adapter that came from another base",
        "peft made its first values from the base that it was put on (DoRA's magnitudes, PiSSA), so "
        "that with the base alone loaded afterwards the two do not belong together.",
        "Load the base before get_peft_model, or the adapter's own checkpoint after the base.",
    ),
    "CKM515": Code(
        "an adapter of other settings",
        "The adapter_config.json beside the adapter says that it adds more or less than the live "
        "model would with the same tensors.",
        "Wrap the model with that config, or load with strict=False, which reports it.",
    ),
    "CKM516": Code(
        "an argument that means nothing",
        "A Python call was given a value of another kind, or a name that it does not know.",
        "The message says what is expected; help() of the call says what it means.",
    ),
    "CKM517": Code(
        "a checkpoint that does not say its step",
        "A run is to go on after the data that it has seen, and nothing in the checkpoint says how "
        "many steps that were.",
        "Save with step=, or load it by ckptmap.load and begin anew.",
    ),
    # ------------------------------------------------------------------ the Hub
    "CKM701": Code(
        "no name of a place on the Hub",
        "A place on the Hub is written hf://org/name[@revision][/folder]; a slash in a revision is "
        "written %2F. Only model repositories are read.",
        "Correct the name; the message says which part of it is wrong.",
    ),
    "CKM702": Code(
        "a repository that is not there, or may not be seen",
        "The Hub gives the same answer for a repository that does not exist and for a private one "
        "that the token may not see.",
        "Check the name, and who you are: hf auth whoami. Log in with hf auth login.",
    ),
    "CKM703": Code(
        "a gated or disabled repository",
        "Its owner gives access to its files on request, and this token has not got it yet; or the "
        "Hub has disabled it.",
        "Ask for access on its page, then log in: hf auth login.",
    ),
    "CKM704": Code(
        "a revision that is not there",
        "The repository has no branch, tag or commit of this name.",
        "Use one of those that the message lists.",
    ),
    "CKM705": Code(
        "a file or folder that the repository has not",
        "At this commit the repository has nothing at this path.",
        "Look at its files on the Hub, or leave the path out.",
    ),
    "CKM706": Code(
        "no connection to the Hub",
        "HF_HUB_OFFLINE is set, or the Hub does not answer: no network, a proxy, a wrong "
        "HF_ENDPOINT. huggingface_hub has tried several times.",
        "Mend the connection, then run the same command again; it continues.",
    ),
    "CKM707": Code(
        "no token, or one that may not do that",
        "Publishing needs a token with the right to write; reading a private repository one with "
        "the right to read.",
        "hf auth login, with a token of the right kind from the settings of the Hub.",
    ),
    "CKM708": Code(
        "the Hub refuses",
        "The Hub answers with an error of its own, also after the waiting that huggingface_hub "
        "does.",
        "Run the same command again later; it continues.",
    ),
    "CKM709": Code(
        "other bytes than the Hub lists",
        "What was fetched has not the size and hash that the repository's tree gives for it, also "
        "the second time.",
        "Run the same command again. If it stays so, the repository or a proxy is damaged.",
    ),
    "CKM710": Code(
        "no space for what is downloaded",
        "The files that the conversion reads do not fit where they are kept.",
        "Free some space, set HF_HOME to a larger disk, or use --low-disk: one file at a time.",
    ),
    "CKM711": Code(
        "a repository that was renamed",
        "Reading follows the new name and says so; publishing does not, because the place is "
        "another than you wrote.",
        "Push to the new name, which the message gives.",
    ),
    "CKM712": Code(
        "a public repository where a private one was asked for",
        "--private makes a new repository private. This one is there already, and public.",
        "Make it private in its settings first, or leave --private out.",
    ),
    "CKM713": Code(
        "an upload that the Hub does not hold as it was sent",
        "After the upload every size and SHA-256 is asked for again, and one differs; or files that "
        "this push does not change were changed beside it. The revision was not touched.",
        "Run the same command again; it sends what is wrong once more.",
    ),
    "CKM714": Code(
        "a pull request that cannot be merged",
        "The main branch was changed meanwhile in the same files, or holds other weights since, or the "
        "Hub refuses the merge.",
        "Look at the pull request; close it and push again to begin from what main is now.",
    ),
    "CKM715": Code(
        "a push that cannot be made",
        "The source cannot be published as it is, or the options contradict each other. Nothing "
        "was sent.",
        "The message says what to change.",
    ),
    "CKM716": Code(
        "an unsafe name in a repository",
        "The repository's list of files holds a path that would leave the directory, or that this "
        "file system cannot hold, or a size or hash that is none.",
        "Do not use it, or this endpoint, unless you know why.",
    ),
    # ------------------------------------------------------------------ naming schemes
    "CKM601": Code(
        "a malformed mapping file",
        "The file is no TOML, has a word that the rule form does not know, or a name, an axis "
        "pattern or an expression that cannot be read.",
        "The form is described in ckptmap/mapping/README.md; `ckptmap mappings check FILE`.",
    ),
    "CKM602": Code(
        "a mapping file that contradicts itself",
        "The sides of a rule have different axes, slices leave a hole or overlap, two rules have "
        "one key, or the way there and back is not the identity.",
        "Correct the rule that is named; `ckptmap mappings check FILE` proves it again.",
    ),
    "CKM603": Code(
        "an unknown naming scheme",
        "--names is no scheme of a mapping file that was found, and no mapping file.",
        "`ckptmap mappings list` shows what there is; CKPTMAP_MAPPINGS names more directories.",
    ),
    "CKM604": Code(
        "a naming scheme that is not recognised",
        "No mapping file has the fingerprints of these keys, or several have.",
        "Say which with --names-from, or give the model's config.json with --config-from.",
    ),
    "CKM605": Code(
        "config values are needed",
        "A rule depends on sizes (heads, head_dim) that the shapes alone do not tell, and no "
        "config.json is beside the checkpoint.",
        "Give it with --config-from PATH.",
    ),
    "CKM606": Code(
        "a shape that a rule does not have",
        "A tensor's shape is not the product of the axes that its rule gives it: the config is "
        "another model's, or the keys are in another scheme or era.",
        "Compare the config values in the message with the model; choose another --names-from.",
    ),
    "CKM607": Code(
        "an incomplete set of keys",
        "Keys that a rule needs are not there: an expert, a layer, one of several tensors that "
        "become one.",
        "Get the missing file or rank; a rule of your own may say `optional = true`.",
    ),
    "CKM608": Code(
        "two sources for one target",
        "Two keys of the source would become the same tensor, or one key is of two rules. One of "
        "them would win, and nobody would know which.",
        "Leave one of them out with --exclude.",
    ),
    "CKM609": Code(
        "keys that no rule knows",
        "The state dict has keys that have no name in the other scheme.",
        "Leave them out, or add rules to a mapping file of your own.",
    ),
    "CKM610": Code(
        "a tensor that cannot be rearranged in memory",
        "A distributed or quantized tensor of a live model can be renamed; its elements are "
        "rearranged only in a checkpoint.",
        "Convert the saved checkpoint with --names, or gather it first where its elements are plain.",
    ),
    "CKM611": Code(
        "optimizer state that cannot follow its weights",
        "Weights that become one have different state, or are in different parameter groups.",
        "Leave the optimizer behind with --optimizer drop.",
    ),
    "CKM613": Code(
        "a value op that cannot be applied",
        "A mapping file names an operation on values that is not known, or that has no inverse, or "
        "tensors of different operations become one.",
        "Use `add C`, `neg` or `cast DTYPE`, or install the package that has it.",
    ),
    "CKM614": Code(
        "sizes that do not work out",
        "An expression over config values gives no whole number, or a slice beyond its axis.",
        "Check the config values in the message.",
    ),
    "CKM615": Code(
        "a mapping that cannot be drafted",
        "The two checkpoints have no tensors that could be the same.",
        "Give two checkpoints of one model, in the two schemes; --values compares contents.",
    ),
    "CKM616": Code(
        "tests of a mapping file that cannot be read",
        "The golden table or the list of refusals beside it cannot be read.",
        "Correct it, or write the table anew with `write_table` of ckptmap.testing.mappings.",
    ),
    "CKM617": Code(
        "a configuration that a scheme refuses",
        "The mapping file says itself that it does not describe models like this one.",
        "Choose another scheme, or give a mapping file of your own.",
    ),
}
