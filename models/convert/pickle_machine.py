"""A pickle machine that can build plain data and nothing else.

torch_file.py runs it over the pickles of a checkpoint. A pickle is a program for a small stack
machine; Python's own machine imports and calls whatever the program names. This one knows the
opcodes of protocol 2 that plain containers and tensors need. A GLOBAL is looked up in a table
given by the caller, whose entries are functions of ours that build inert objects; REDUCE calls
only those, BUILD is ignored on the types that really carry one, and the opcodes that make or
import anything else are refused by name. Nothing of the file is ever imported or evaluated.

Work is bounded: one object per operation, a limit on operations, integers of 64 bits, and keys
whose hash cannot be made expensive.
"""

import struct

from fault import Refused, show

OPERATIONS_MAX = 16_000_000  # a dictionary of a million words takes about eight million
KEY_MAX = 4  # items of a tuple that is a key

# Opcodes that are refused, so that the message can name them.
REFUSED = {
    0x69: "INST", 0x6F: "OBJ", 0x81: "NEWOBJ", 0x92: "NEWOBJ_EX", 0x82: "EXT1",
    0x83: "EXT2", 0x84: "EXT4", 0x93: "STACK_GLOBAL", 0x50: "PERSID", 0x95: "FRAME",
    0x94: "MEMOIZE", 0x42: "BINBYTES", 0x43: "SHORT_BINBYTES", 0x8C: "SHORT_BINUNICODE",
    0x54: "BINSTRING", 0x55: "SHORT_BINSTRING", 0x53: "STRING", 0x49: "INT", 0x4C: "LONG",
    0x46: "FLOAT", 0x56: "UNICODE", 0x8B: "LONG4", 0x67: "GET", 0x70: "PUT",
}


class Constructor:
    """Stands for one allowed global. make(arguments) builds what REDUCE puts on the stack."""

    __slots__ = ("name", "make")

    def __init__(self, name, make):
        self.name = name
        self.make = make

    def __repr__(self):
        return self.name


class Opaque:
    """An object that is parsed and dropped: NumPy scalars and arrays in params, metrics."""

    __slots__ = ("name",)

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return "<" + self.name + ">"


class StateDict(dict):
    """collections.OrderedDict; a type of its own because only it may carry a BUILD."""


def _is_key(value):
    """Text, whole numbers, and XLM's pairs of languages. Tuples hash anew each time, nested ones in
    exponential time; tuples of numbers, and before Python 3.10 NaN, can be chosen to collide."""
    if isinstance(value, tuple):
        return len(value) <= KEY_MAX and all(isinstance(item, str) for item in value)
    return isinstance(value, (str, int, type(None)))


class PickleMachine:
    """Runs one pickle found in data[begin:]; run() gives the object, .pos the byte after it."""

    def __init__(self, data, begin, what, constructors, persistent):
        self.data = data
        self.pos = begin
        self.begin = begin
        self.what = what  # how messages call this pickle
        self.constructors = constructors
        self.persistent = persistent  # builds the object of a persistent id
        self.stack = []
        self.marks = []
        self.memo = {}

    def refuse(self, text):
        raise Refused("%s: byte %d: %s" % (self.what, self.pos - self.begin, text))

    # ---- reading arguments ------------------------------------------------------------------

    def take(self, n):
        end = self.pos + n
        if end > len(self.data):
            self.refuse("the file ends here (truncated): %d more bytes expected, %d left"
                        % (n, len(self.data) - self.pos))
        part = bytes(self.data[self.pos:end])
        self.pos = end
        return part

    def number(self, layout):
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self):
        """A text argument: ended by a line feed; names of globals are short."""
        part = bytes(self.data[self.pos:self.pos + 256])
        end = part.find(b"\n")
        if end < 0:
            self.refuse("a name without an end (truncated, or longer than 255 bytes)")
        self.pos += end + 1
        return part[:end].decode("utf-8", "backslashreplace")

    # ---- the stack --------------------------------------------------------------------------

    def push(self, value):
        self.stack.append(value)

    def pop(self):
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) <= floor:
            self.refuse("the pickle takes from an empty stack (damaged)")
        return self.stack.pop()

    def top(self, kind):
        value = self.pop()
        self.push(value)
        if not isinstance(value, kind):
            self.refuse("a %s was due here, found %s" % (kind.__name__, show(value)))
        return value

    def pop_to_mark(self):
        if not self.marks:
            self.refuse("the pickle takes a mark that is not there (damaged)")
        floor = self.marks.pop()
        items = self.stack[floor:]
        del self.stack[floor:]
        return items

    def put(self, index):
        self.push(self.pop())  # checks that there is one
        self.memo[index] = self.stack[-1]

    def get(self, index):
        if index not in self.memo:
            self.refuse("memo entry %d was never stored (damaged)" % index)
        self.push(self.memo[index])

    # ---- opcodes that do something ----------------------------------------------------------

    def op_proto(self):
        version = self.number("<B")
        if version != 2:
            self.refuse("pickle protocol 2 expected, got %d" % version)

    def op_long1(self):
        n = self.number("<B")
        if n > 8:
            self.refuse("an integer of %d bytes, the limit is 8" % n)
        self.push(int.from_bytes(self.take(n), "little", signed=True))

    def op_unicode(self):
        try:
            self.push(self.take(self.number("<I")).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            self.refuse("a string that is not UTF-8 (damaged)")

    def op_tuple(self, n):
        items = [self.pop() for _ in range(n)]
        self.push(tuple(reversed(items)))

    def append(self, items):
        self.top(list).extend(items)

    def set_items(self, items):
        target = self.top(dict)
        if len(items) % 2:
            self.refuse("a key without a value (damaged)")
        for key, value in zip(items[::2], items[1::2]):
            if not _is_key(key):
                self.refuse("a dictionary key that is not plain data: %s" % show(key))
            target[key] = value

    def op_setitem(self):
        value = self.pop()
        key = self.pop()
        self.set_items([key, value])

    def op_global(self):
        module = self.line()
        name = module + "." + self.line()
        if name not in self.constructors:
            self.refuse("the pickle names '%s', which is not among the plain data types a"
                        " checkpoint needs; nothing was executed" % name)
        self.push(self.constructors[name])

    def op_reduce(self):
        arguments = self.pop()
        function = self.pop()
        if not isinstance(function, Constructor) or not isinstance(arguments, tuple):
            self.refuse("a call of %s, which is not an allowed constructor" % show(function))
        try:
            self.push(function.make(arguments))
        except Refused as fault:
            self.refuse(str(fault))

    def op_build(self):
        self.pop()  # the state: _metadata of a state dict, or what NumPy needs
        value = self.pop()
        if not isinstance(value, (StateDict, Opaque)):
            self.refuse("a BUILD on %s; only state dicts and NumPy objects have one" % show(value))
        self.push(value)

    def op_persistent(self):
        try:
            self.push(self.persistent(self.pop()))
        except Refused as fault:
            self.refuse(str(fault))

    OPCODES = {
        0x80: op_proto,
        0x28: lambda m: m.marks.append(len(m.stack)),  # MARK
        0x30: lambda m: m.pop(),  # POP
        0x31: lambda m: m.pop_to_mark(),  # POP_MARK
        0x4E: lambda m: m.push(None),
        0x88: lambda m: m.push(True),
        0x89: lambda m: m.push(False),
        0x4B: lambda m: m.push(m.number("<B")),  # BININT1
        0x4D: lambda m: m.push(m.number("<H")),  # BININT2
        0x4A: lambda m: m.push(m.number("<i")),  # BININT
        0x8A: op_long1,
        0x47: lambda m: m.push(m.number(">d")),  # BINFLOAT
        0x58: op_unicode,  # BINUNICODE
        0x7D: lambda m: m.push({}),
        0x5D: lambda m: m.push([]),
        0x29: lambda m: m.push(()),
        0x85: lambda m: m.op_tuple(1),
        0x86: lambda m: m.op_tuple(2),
        0x87: lambda m: m.op_tuple(3),
        0x74: lambda m: m.push(tuple(m.pop_to_mark())),  # TUPLE
        0x61: lambda m: m.append([m.pop()]),  # APPEND
        0x65: lambda m: m.append(m.pop_to_mark()),  # APPENDS
        0x73: op_setitem,
        0x75: lambda m: m.set_items(m.pop_to_mark()),  # SETITEMS
        0x71: lambda m: m.put(m.number("<B")),  # BINPUT
        0x72: lambda m: m.put(m.number("<I")),  # LONG_BINPUT
        0x68: lambda m: m.get(m.number("<B")),  # BINGET
        0x6A: lambda m: m.get(m.number("<I")),  # LONG_BINGET
        0x63: op_global,
        0x52: op_reduce,
        0x62: op_build,
        0x51: op_persistent,
    }

    def run(self):
        opcodes = self.OPCODES
        for _ in range(OPERATIONS_MAX):
            code = self.take(1)[0]
            if code == 0x2E:  # STOP
                return self.pop()
            operation = opcodes.get(code)
            if operation is None:
                self.pos -= 1
                name = REFUSED.get(code, "unknown")
                self.refuse("pickle opcode 0x%02x (%s) is not one that checkpoints need"
                            % (code, name))
            operation(self)
        return self.refuse("more than %d operations" % OPERATIONS_MAX)
