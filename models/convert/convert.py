#!/usr/bin/env python3
"""Turns an authors' checkpoint into a model directory that pkmserve serves.

    python3 models/convert/convert.py SOURCE -o DIR [--vocab FILE] [--codes FILE]
        [--tokenizer FILE] [--dtype f32|bf16|f16|int8 [--force]] [--values q4] [--set KEY=VALUE ...]
        [--program PKMSERVE] [--from auto|xlm|all-attention|memory-layers|sparse-memory-lm|hf]
        [--memory FILE --memory-config JSON [--memory-names plain|hashing-memory|...]]

Python 3.9 or later with NumPy. Nothing of the checkpoint is executed (pickle_machine.py). The
directory appears complete or not at all: it is written beside its place, synced and renamed.
Ends with 0, with 1 and one line on standard error, or with 2 when called wrongly.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from types import SimpleNamespace

sys.dont_write_bytecode = True  # a read-only checkout stays as it is

try:
    import numpy  # noqa: F401  (looked for here, so that its absence is one line)
except ImportError:
    sys.exit("convert: NumPy is missing: run 'pip install numpy' if this Python is of a virtual environment,"
             " else install the Debian package python3-numpy")

import all_attention
import hf
import hf_memory
import identity
import memory_layers
import memory_layers_params
import safetensors_file
import sparse_memory_lm
import text_files
import xlm
import xlm_params
from fault import Refused, one_line, show
from torch_file import TorchFile

MODULES = {"xlm": xlm, "all-attention": all_attention, "memory-layers": memory_layers,
           "sparse-memory-lm": sparse_memory_lm, "hf": hf}
SETTABLE = {"xlm": xlm_params.SETTABLE, "all-attention": all_attention.SETTABLE,
            "memory-layers": memory_layers.SETTABLE, "sparse-memory-lm": sparse_memory_lm.SETTABLE,
            "hf": hf.SETTABLE}
TEXT = {"char": "text by characters", "byte": "text by bytes", "word": "text by words",
        "xlm": "text split with BPE already"}
SPLIT_FIRST = """\
This model knows text only as its training data had it, split with BPE codes ("hou@@ se"). Of plain text
most words are unknown to it, and perplexities of unknown words look excellent and mean nothing. Split
texts with fastBPE and the same codes before they are sent, or convert again with --codes FILE, so that
the server splits plain text itself. FILE is `codes` in the folder of XLM's preprocessed data."""
WRITTEN = {"config.json", "generation_config.json", "model.safetensors", "vocab.txt", "codes", "tokenizer.model",
           "tokenizer.json", "vocab.json", "merges.txt", identity.NAME}
MADE = ("pkm_transformer", "all_attention", "memory_llama")  # model_type of what is made here


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, "convert: %s (--help shows the usage)\n" % one_line(message, 1200))


def setting(text):
    """KEY=VALUE of --set; VALUE is JSON where it can be read as such, else a string."""
    key, equals, value = text.partition("=")
    if not equals or not any(key in keys for keys in SETTABLE.values()):
        raise argparse.ArgumentTypeError("KEY=VALUE expected, got %s; KEY is one of %s" % (show(text), "; ".join(
            "%s: %s" % (family, " ".join(keys)) for family, keys in SETTABLE.items())))
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def arguments(argv):
    parser = Parser(prog="convert.py",
                    description="Turns an authors' checkpoint into a model directory.")
    parser.add_argument("source", metavar="SOURCE",
                        help="checkpoint file (XLM: .pth, all-attention: .pt), of memory layers the"
                        " folder with consolidated.pth and params.json, or a Hugging Face directory")
    parser.add_argument("-o", "--output", required=True, metavar="DIR",
                        help="model directory to make")
    parser.add_argument("--from", dest="family", choices=["auto", *MODULES], default="auto")
    parser.add_argument("--vocab", metavar="FILE",
                        help="words in the order of their ids, one per line")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--codes", metavar="FILE",
                      help="fastBPE codes: the server then splits plain words itself")
    text.add_argument("--tokenizer", metavar="FILE",
                      help="to use instead of the words: a SentencePiece model, or a tokenizer.json, a"
                      " vocab.json beside its merges.txt or a rank file of byte-level BPE")
    parser.add_argument("--dtype", choices=sorted(safetensors_file.NAMES),
                        help="of matrices and tables; vectors stay f32 (default: f32; of memory layers"
                        " what params.json says, and tables of 16 bits stay as they are; of Hugging"
                         " Face directories that of the files)")
    parser.add_argument("--values", choices=["q4"],
                        help="of memories' value tables: 4 bits a value and a scale for each row; what it"
                        " loses `pkmserve compare` tells")
    parser.add_argument("--program", metavar="PROGRAM",
                        help="pkmserve, which computes the probe of model.sha256; none: without one"
                        " (identity.py says where it is looked for)")
    parser.add_argument("--memory", metavar="FILE",
                        help="of a Hugging Face directory: the memories to add, safetensors or .pt")
    parser.add_argument("--memory-config", metavar="JSON", help="what these are and where they go")
    parser.add_argument("--memory-names", choices=sorted(hf_memory.NAMES), default="plain",
                        help="whose module named the tensors (default: plain)")
    parser.add_argument("--force", action="store_true",
                        help="with int8: write also a tensor whose relative error exceeds %g"
                        % safetensors_file.LOSS_MAX)
    parser.add_argument("--set", dest="settings", metavar="KEY=VALUE", action="append", default=[],
                        type=setting, help="a parameter the checkpoint lacks")
    args = parser.parse_args(argv)
    if args.force and args.dtype != "int8":
        parser.error("--force goes with --dtype int8: no other type is refused for its loss")
    if (args.memory is None) != (args.memory_config is None):
        parser.error("--memory FILE and --memory-config JSON go together")
    if args.memory is None and args.memory_names != "plain":
        parser.error("--memory-names goes with --memory FILE")
    return args


def not_a_source(folder):
    """What to say of a folder that holds no model: mostly one of its files is wanted."""
    wanted = (memory_layers.WEIGHTS, memory_layers_params.NAME)
    missing = [name for name in wanted if not os.path.isfile(os.path.join(folder, name))]
    text = "a directory, which only a checkpoint of memory layers may be, and then it holds %s: %s;" \
        " or a model in Hugging Face form, which has %s" \
        % (" and ".join(wanted), " and ".join(missing) + (" are" if len(missing) > 1 else " is")
           + " missing", hf.CONFIG)
    files = sorted(name for name in os.listdir(folder)
                   if name.endswith((".pth", ".pt")) and name not in wanted)
    if files:
        files.sort(key=lambda name: name != "checkpoint.pth")
        text += "; did you mean the file %s%s" % (
            os.path.join(folder, files[0]),
            " or another of its %d checkpoints" % len(files) if len(files) > 1 else "")
    return text


def open_directory(folder, family, memory):
    """A model of several files, and its family."""
    weights = os.path.join(folder, memory_layers.WEIGHTS)
    is_memory = os.path.isfile(weights) and memory_layers.is_place(weights)
    if family not in ("auto", "memory-layers", "hf"):
        raise Refused("a directory; checkpoints of the %s family are single files" % family)
    if family == "hf" or family == "auto" and not is_memory and hf.is_place(folder):
        return hf.HfDirectory(folder, memory), "hf"
    if not is_memory:
        raise Refused(not_a_source(folder))
    return TorchFile(weights), "memory-layers"


def file_in(path, family):
    """What messages name as the source: of a folder of sparse-memory-lm the file that holds its weights."""
    if not os.path.isdir(path) or family not in ("auto", "sparse-memory-lm"):
        return path
    found = sparse_memory_lm.source_in(path)
    if found is None and family == "sparse-memory-lm":
        raise Refused("a directory without %s or %s" % (sparse_memory_lm.REST, sparse_memory_lm.WHOLE))
    return found or path


def open_source(path, family, memory):
    """The checkpoint and its family. memory: of HfDirectory or None."""
    if os.path.isdir(path):
        return open_directory(path, family, memory)
    if family == "hf":
        raise Refused("a file; models in Hugging Face form are directories with %s" % hf.CONFIG)
    file = TorchFile(path)
    if family == "auto":
        found = [name for name, module in MODULES.items() if module.looks_like(file.root)]
        family = found[0] if found else "memory-layers" if memory_layers.is_place(path) else None
    if family is None:
        raise Refused("not an XLM checkpoint, nor one of the all-attention network, of memory layers"
                      " or of sparse-memory-lm")
    return file, family


def vocabulary(path, words, n_vocab):
    """The bytes of vocab.txt: the given file if it fits, else the checkpoint's own words."""
    if path is not None:
        with open(path, "rb") as file:
            text = file.read()
        n_line = text.count(b"\n") + (not text.endswith(b"\n") and len(text) > 0)
        if n_line != n_vocab:
            raise Refused("--vocab %s: %d lines expected, one for each id, got %d"
                          % (path, n_vocab, n_line))
        try:
            text.decode()
        except UnicodeDecodeError as fault:
            raise Refused("--vocab %s: not UTF-8 at byte %d" % (path, fault.start))
        return text
    if words is None:
        raise Refused("the file holds no words (dico_id2word); give them with --vocab FILE")
    for index, word in enumerate(words):
        if not word or any(c in word for c in "\n\r\0"):
            raise Refused("dico_id2word: id %d: %s cannot be a line of vocab.txt"
                          % (index, show(word)))
    try:
        return "".join(word + "\n" for word in words).encode()
    except UnicodeEncodeError as fault:
        raise Refused("dico_id2word: a word that is not Unicode text: %s"
                      % ascii(fault.object[fault.start]))


def check_text(args, config, vocab):
    """The files that text is read with, which the server must not refuse once they are there."""
    kind = config.get("tokenizer")
    if args.tokenizer is not None and kind is not None:
        raise Refused("--tokenizer %s and --set vocab_kind=%s: text is read with one of them"
                      % (args.tokenizer, kind))
    if kind is not None:
        source = "dico_id2word" if args.vocab is None else "--vocab %s" % args.vocab
        text_files.check_words(vocab, source, kind)
    if args.codes is not None:
        text_files.check_codes(args.codes)


def read_text(args, family, model):
    """What text is read with, and the rest of config. .vocab: bytes of vocab.txt or None; .files: [(path,
    name in the directory)]; .codes: a path or None; .how: for the summary."""
    settings, config = dict(args.settings), model.config
    if args.codes is not None and family != "xlm":
        raise Refused("--codes %s: the words of XLM models alone are split with them" % args.codes)
    text = SimpleNamespace(vocab=None, codes=args.codes)
    why = tokenizer = None
    if family in ("memory-layers", "sparse-memory-lm", "hf") and args.vocab is not None:
        raise Refused("--vocab %s: models of the %s family read bytes or the pieces of"
                      " a --tokenizer, not words" % (args.vocab, family))
    if family == "memory-layers":
        text.vocab, tokenizer, why = memory_layers.read_text(model, args.tokenizer, settings)
    elif family in ("sparse-memory-lm", "hf"):
        tokenizer, why = MODULES[family].read_text(model, args.tokenizer, settings)
    else:
        text.vocab = vocabulary(args.vocab, model.words, config["vocab_size"])
        if family == "all-attention":
            all_attention.name_tokens(config, text.vocab, settings)
        elif args.tokenizer is None:
            config["tokenizer"] = "xlm"
        check_text(args, config, text.vocab)
        if args.tokenizer is not None:
            tokenizer = text_files.read_tokenizer(args.tokenizer, config["vocab_size"])
    text.files = (tokenizer.files if tokenizer else []) + ([(text.codes, "codes")] if text.codes else [])
    text.how = tokenizer.how if tokenizer else "plain text, split by its codes" \
        if text.codes else TEXT.get(config.get("tokenizer"), "token ids in and out")
    text.how += " (%s)" % why if why else ""
    return text


def choose_values(model, dtype):
    """Gives the value tables of memories a type of their own."""
    tables = [(name, array) for name, array in model.tensors
              if name.startswith("memories.") and name.endswith(".values.weight")]
    for name, array in tables:
        if array.shape[1] % 2:
            raise Refused("--values %s: tensor '%s' has rows of %d columns, which have no two halves"
                          % (dtype, name, array.shape[1]))
    if not tables:
        raise Refused("--values %s: the model has no memory" % dtype)
    model.own = {**model.own, **dict.fromkeys((name for name, _ in tables), dtype)}


def write_synced(path, fill):
    with open(path, "wb") as file:
        result = fill(file)
        file.flush()
        os.fsync(file.fileno())
    return result


def sync_directory(path):
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fill_directory(directory, model, source, args):
    """Writes the files of a model directory. Returns what safetensors_file.write does."""
    config = json.dumps(model.config, indent=1, ensure_ascii=False).encode() + b"\n"
    written = write_synced(os.path.join(directory, "model.safetensors"),
                           lambda file: safetensors_file.write(file, model.tensors,
                                                               model.config["dtype"], args.force,
                                                               model.own))
    write_synced(os.path.join(directory, "config.json"), lambda file: file.write(config))
    if getattr(model, "generation", None):
        generation = json.dumps(model.generation, indent=1).encode() + b"\n"
        write_synced(os.path.join(directory, "generation_config.json"),
                     lambda file: file.write(generation))
    if source.vocab is not None:
        write_synced(os.path.join(directory, "vocab.txt"), lambda file: file.write(source.vocab))
    for path, name in source.files:
        with open(path, "rb") as opened:
            write_synced(os.path.join(directory, name),
                         lambda file: shutil.copyfileobj(opened, file))
    sums, written.no_probe = identity.content(directory, identity.find_program(args.program))
    write_synced(os.path.join(directory, identity.NAME), lambda file: file.write(sums))
    sync_directory(directory)
    return written


def made_here(directory):
    """Whether its config.json says that it is a conversion's."""
    try:
        with open(os.path.join(directory, "config.json"), "rb") as file:
            config = json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("model_type") in MADE


def check_place(output, source):
    """The output may be new, empty, or an earlier conversion, which is then replaced."""
    if os.path.lexists(output):
        if not os.path.isdir(output) or os.path.islink(output):
            raise Refused("--output %s exists and is not a directory" % output)
        if any(os.path.exists(path) and os.path.samefile(output, path)
               for path in (source, os.path.dirname(os.path.abspath(source)))):
            raise Refused("--output %s holds the source, which would be replaced; give a new directory" % output)
        present = sorted(os.listdir(output))
        others = [name for name in present if name not in WRITTEN]
        if others:
            raise Refused("--output %s holds other files (%s); give a new directory"
                          % (output, others[0]))
        if present and not made_here(output):
            raise Refused("--output %s holds what is no earlier conversion (%s); give a new directory"
                          % (output, present[0]))


def make_parents(path):
    """Makes the missing directories above path; returns them, the deepest first."""
    made, parent = [], os.path.dirname(path)
    while not os.path.isdir(parent):
        made.append(parent)
        parent = os.path.dirname(parent)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return made


def publish(staged, output):
    """Puts the finished directory in its place."""
    old = None
    if os.path.isdir(output) and os.listdir(output):
        old = tempfile.mkdtemp(prefix=".old-", dir=os.path.dirname(output))
        os.rename(output, old)
    try:
        os.rename(staged, output)
    except OSError:
        if old is not None:
            os.rename(old, output)
        raise
    sync_directory(os.path.dirname(output))
    if old is not None:
        shutil.rmtree(old)


def save(args, model, text):
    output = os.path.abspath(args.output)
    check_place(output, args.source)
    made = make_parents(output)
    staged = None
    try:
        staged = tempfile.mkdtemp(prefix=".convert-", dir=os.path.dirname(output))
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(staged, 0o777 & ~mask)  # mkdtemp's own mode is private
        written = fill_directory(staged, model, text, args)
        publish(staged, output)
        staged = None
        made = []
        return written
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        for directory in made:
            try:
                os.rmdir(directory)
            except OSError:
                break


def family_summary(c):
    if c["model_type"] == "all_attention":
        return all_attention.summary(c)
    if c["model_type"] == "memory_llama":
        return memory_layers.summary(c)
    lines = ["XLM, layers %d of %d, heads %d, vocabulary %d, context %d, %s, %s output" % (
        c["n_layer"], c["d_model"], c["n_head"], c["vocab_size"], c["max_position"],
        c["activation"], "tied" if c["tie_output"] else "untied")]
    if "languages" in c:
        lines.append("languages: %s" % " ".join(c["languages"]))
    for m in c["memories"]:
        keys = "%d keys" % m["n_key"] if m["kind"] == "flat" \
            else "%d x %d keys" % (m["n_key"], m["n_key"])
        lines.append("memory %s layer %d: %s (%d slots), heads %d, k = %d, queries of %d%s" % (
            m["place"], m["layer"], keys, m["n_slot"], m["n_head"], m["k_top"], m["d_key"],
            " with batch norm" if m["query_batch_norm"] else ""))
    return lines


def summary(args, family, model, text, written):
    lines = hf.summary(model) if family == "hf" else family_summary(model.config)
    lines[0] = "%s: %s" % (args.output, lines[0])
    loss = ", relative error at most %.4f (%s)" % written.loss if written.loss else ""
    own = "".join(", tables in %s" % dtype for dtype in sorted(set(model.own.values())))
    lines.append("%d tensors, %d parameters, %d bytes in %s%s%s; %s" % (
        len(model.tensors), written.parameters, written.bytes, model.config["dtype"], own, loss,
        text.how))
    if model.config.get("tokenizer") == "xlm" and text.codes is None:
        lines.append(SPLIT_FIRST)
    if written.no_probe and args.program != "none":
        lines.append("model.sha256 has no probe of what the model computes: %s" % written.no_probe)
    lines += getattr(model, "advice", [])
    return "\n".join(lines)


def convert(args):
    check_place(os.path.abspath(args.output), args.source)  # before hours of work
    for option, path in (("--tokenizer", args.tokenizer), ("--codes", args.codes)):
        if path is not None and os.path.getsize(path) == 0:
            raise Refused("%s %s is empty" % (option, path))
    source = args.source
    try:
        source = file_in(source, args.family)
        memory = None if args.memory is None else (args.memory, args.memory_config, args.memory_names)
        file, family = open_source(source, args.family, memory)
        if memory is not None and family != "hf":
            raise Refused("--memory %s: memories are added to models in Hugging Face form alone, this is"
                          " one of the %s family" % (args.memory, family))
        for key, _ in args.settings:
            if key not in SETTABLE[family]:
                raise Refused("--set %s is not for the %s family" % (key, family))
        model = MODULES[family].read(file, dict(args.settings), args.dtype)
        text = read_text(args, family, model)
        if args.values is not None:
            choose_values(model, args.values)
        written = save(args, model, text)
    except Refused as fault:
        raise Refused("%s: %s" % (source, fault))
    print(summary(args, family, model, text, written))


def main(argv):
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        convert(args)
        return 0
    except Refused as fault:
        message = str(fault)
    except OSError as fault:
        message = "%s: %s" % (fault.filename or args.output, fault.strerror or fault)
    except KeyboardInterrupt:
        message = "interrupted; nothing was written"
    except Exception as fault:  # a damage no check foresaw must still end in one line, unwritten
        message = "%s: cannot be converted: %s: %s" % (args.source, type(fault).__name__, fault)
    print("convert: " + one_line(message), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
