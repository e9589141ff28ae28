"""What the commands of this folder share: files that are written whole or not at all, and faults of files
and devices said in one line. Whoever imports it can import the converter's modules too.
"""
import contextlib
import hashlib
import json
import lzma
import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "convert"))


@contextlib.contextmanager
def whole_file(path, mode="wb", **how):
    """A file that takes the place of `path` once it is complete and on the disk. Who is killed or runs out of
    room while it is written has the old file still, and who reads the old one goes on reading that."""
    path = os.fspath(path)
    part = path + ".part"
    try:
        with open(part, mode, **how) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def copy_whole(source, path):
    with open(source, "rb") as given:
        content = given.read()
    with whole_file(path) as f:
        f.write(content)


def read_text(path, newline=""):
    """A text in UTF-8, .txt or .txt.xz. Line ends are kept, as the server keeps them; newline=None: "\\n" for each."""
    opener = lzma.open if str(path).endswith(".xz") else open
    try:
        with opener(path, "rt", encoding="utf-8", newline=newline) as f:
            return f.read()
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as e:
        raise SystemExit(f"{path}: no text in UTF-8, or no whole .xz file: {e}") from None


def read_object(path):
    """The object of a JSON file."""
    with open(path, encoding="utf-8") as f:
        try:
            found = json.load(f)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise SystemExit(f"{path}: a JSON object is expected")
    return found


def file_hash(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def run(main):
    """Calls the main function of a command; a file that cannot be read or written is a line, not a traceback."""
    try:
        main()
    except BrokenPipeError:
        pass  # Who read our output has gone.
    except OSError as e:
        raise SystemExit(f"{e.filename}: {e.strerror}" if e.filename else str(e)) from None


def check_range(parser, args, least, *names):
    """Refuses options below `least`, by name; a number that is none is below everything."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")


def check_positive(parser, args, *names):
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} is {value}, but must be above 0")


def check_at_most(parser, args, **most):
    for name, limit in most.items():
        value = getattr(args, name)
        if value is not None and not value <= limit:
            parser.error(f"--{name.replace('_', '-')} is {value}, but must be at most {limit}")
