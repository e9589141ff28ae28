"""Fields of a protocol buffer, in which SentencePiece keeps its models. Used by text_files.py and the trainer."""


def fields(data):
    """(number, value) of each field: an integer where it is a varint, else its bytes. ValueError or IndexError
    where the data are none."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
        elif kind in (1, 2, 5):
            n = {1: 8, 5: 4}.get(kind)
            if n is None:
                n, at = _varint(data, at)
            value = data[at:at + n]
            at += n
        if kind not in (0, 1, 2, 5) or at > len(data):
            raise ValueError
        yield key >> 3, value


def _varint(data, at):
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError
