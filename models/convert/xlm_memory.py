"""The memories of an XLM checkpoint: which tensors each must have, how pkmserve's file has them.

xlm.py asks for a memory's shapes and its entry of config.json (expect), and, once all tensors are
there, has the query networks, slot maps and shared value tables brought into the one form that
models/FORMAT.md documents (arrange). Nothing is computed: rows are put one after the other.
"""

import numpy as np

from fault import Refused, show

NORM = ("weight", "bias", "running_mean", "running_var")
CHUNK_ROWS = 4096
MAP = ".head_permutations"
TABLE = ".values.weight"


def place_name(layer, after):
    return "memories.%d_%s" % (layer, "after" if after else "in")


def size_of(weights, name):
    """The claimed size of a tensor from which a dimension is taken."""
    if name not in weights:
        raise Refused("tensor '%s' is missing" % name)
    return weights[name].size


# ---- sizes ------------------------------------------------------------------------------------


def _n_key(m, name, size):
    """Keys of a set, from the shape of the tensor."""
    dims = 2 if m.shared_keys else 3 if m.flat else 4
    if len(size) != dims:
        raise Refused("tensor '%s': %d dimensions expected, got shape %s"
                      % (name, dims, show(list(size))))
    n_key = size[-2]
    if not 1 <= n_key <= 1 << 24:
        raise Refused("tensor '%s': shape %s" % (name, show(list(size))))
    if m.k_top > n_key:
        raise Refused("params.mem_knn: %d is more than the %d keys of tensor '%s'"
                      % (m.k_top, n_key, name))
    return n_key


def _check_sizes(m, name, n_key):
    """What params repeat of the keys. Returns (slots of the keys, rows of the value table)."""
    n_pair = n_key if m.flat else n_key * n_key
    if n_pair >= 1 << 31:
        raise Refused("tensor '%s': %d keys make %d slots, less than 2^31 are served" % (name, n_key, n_pair))
    n_index = n_pair
    if m.binary_keys and m.sizes["n_indices"] is not None:
        # Their number follows from mem_k_dim; a larger table has rows that nothing reaches.
        n_index = m.sizes["n_indices"]
        if not isinstance(n_index, int) or n_index < n_pair or (n_index > n_pair and m.slot_map):
            raise Refused("params.n_indices: %s, but tensor '%s' has %d binary keys (%d expected)"
                          % (show(n_index), name, n_key, n_pair))
    n_row = n_index if m.modulo == -1 else m.modulo
    for field, due in (("mem_n_keys", n_key), ("n_indices", n_index), ("mem_size", n_row)):
        skipped = field == "mem_n_keys" and m.binary_keys
        if m.sizes[field] is not None and m.sizes[field] != due and not skipped:
            raise Refused("params.%s: %s, but tensor '%s' has %d keys (%d expected)"
                          % (field, show(m.sizes[field]), name, n_key, due))
    if m.modulo >= n_index:
        raise Refused("params.mem_modulo_size: less than the %d slots of tensor '%s' expected,"
                      " got %d" % (n_index, name, m.modulo))
    return n_pair, n_row


# ---- query networks ---------------------------------------------------------------------------


def _parts(m, d_model):
    """The linear layers of the query network: (its number in our file, the names of its pieces in
    the checkpoint, those of their batch norms, rows of a piece, shape of a piece's weight)."""
    n_net = 2 * m.n_head if m.per_half else 1
    widths = [d_model] + [n * n_net for n in m.hidden] + [m.n_head * m.d_key]
    for i in range(len(widths) - 1):
        j = i * (3 if m.batch_norm else 2)
        rows, columns = widths[i + 1], d_model if i == 0 else m.hidden[i - 1]
        if m.grouped:
            yield j, ["%d" % j if i == 0 else "%d.layer" % j], ["%d" % (j + 1)], \
                rows, (rows, columns) if i == 0 else (rows, columns, 1)
        elif m.per_half:
            yield j, ["%d.%d" % (g, j) for g in range(n_net)], \
                ["%d.%d" % (g, j + 1) for g in range(n_net)], \
                rows // n_net, (rows // n_net, columns)
        else:
            prefix = "0." if m.hidden else ""
            yield j, ["%s%d" % (prefix, j)], ["%s%d" % (prefix, j + 1)], rows, (rows, columns)


def _pieces(m, d_model):
    """(name in our file, names of its pieces in the checkpoint, shape of each piece)."""
    for j, linears, norms, rows, shape in _parts(m, d_model):
        yield "%d.weight" % j, [name + ".weight" for name in linears], shape
        if m.query_bias:
            yield "%d.bias" % j, [name + ".bias" for name in linears], (rows,)
        for part in NORM if m.batch_norm else ():
            yield "%d.%s" % (j + 1, part), ["%s.%s" % (name, part) for name in norms], (rows,)


def _query(name):
    return name + ".query_proj.query_mlps."


# ---- for xlm.py -------------------------------------------------------------------------------


def expect(shapes, weights, p, index):
    """Adds the tensors of memory index to shapes and returns its entry of config.json."""
    m = p.memory
    layer, after = m.places[index]
    name = place_name(layer, after)
    n_key = _n_key(m, name + ".keys", size_of(weights, name + ".keys"))
    n_pair, n_row = _check_sizes(m, name + ".keys", n_key)
    halves = () if m.flat else (2,)
    d_half = m.d_key if m.flat else m.d_key // 2
    sets = () if m.shared_keys else (m.n_head,) + halves
    shapes[name + ".keys"] = sets + (n_key, d_half)
    shapes[name + TABLE] = (n_row, p.d_model)
    if m.slot_map:
        shapes[name + MAP] = (m.n_head, n_pair)
    if m.has_network:
        for _, pieces, shape in _pieces(m, p.d_model):
            for piece in pieces:
                shapes[_query(name) + piece] = shape
    entry = {"layer": layer, "place": "after" if after else "in",
             "kind": "flat" if m.flat else "product", "n_head": m.n_head, "k_top": m.k_top,
             "n_key": n_key, "d_key": m.d_key, "n_slot": min(n_row, n_pair),
             "query_batch_norm": m.batch_norm, "query_bias": m.query_bias}
    options = {"query": ("mlp", m.query), "query_hidden": ([], m.hidden),
               "query_normalize": (False, m.query_normalize), "shared_keys": (False, m.shared_keys),
               "slot_map": (False, m.slot_map), "modulo": (False, n_row < n_pair),
               "temperature": (1, m.temperature), "softmax": (True, m.softmax),
               "subtract": ("none", m.subtract), "normalize": (False, m.normalize)}
    entry.update((key, value) for key, (usual, value) in options.items() if value != usual)
    if m.share_values and index > 0:
        entry["values_of"] = 0
    return entry


def is_shared_table(p, name, other):
    """Whether tensor name may stand in the storage of tensor other, being the same table."""
    return p.memory is not None and p.memory.share_values and name.startswith("memories.") \
        and name.endswith(TABLE) and other.startswith("memories.") and other.endswith(TABLE)


def _slot_map(name, array):
    for head in range(array.shape[0]):
        if not np.array_equal(np.sort(array[head]), np.arange(array.shape[1])):
            raise Refused("tensor '%s': head %d is not a permutation of the slots 0..%d"
                          % (name, head, array.shape[1] - 1))
    return array.astype(np.int32)


def drop_copy(arrays, name, of, field):
    """The file repeats a tensor that params say is another one; the copy goes. Of a table that was cut
    the rows that are left are compared."""
    kept = arrays[of]
    copy = arrays.pop(name)[:len(kept)]
    for i in range(0, len(kept), CHUNK_ROWS):
        same = copy[i:i + CHUNK_ROWS] == kept[i:i + CHUNK_ROWS]
        if not np.all(same | np.isnan(kept[i:i + CHUNK_ROWS])):  # NaN has its own message
            raise Refused("tensor '%s' differs from '%s' at row %d, but params.%s is true"
                          % (name, of, i + np.argmin(same.all(1)), field))


def arrange(arrays, p, entries):
    """Brings the memories' tensors, by name, into the form of our file."""
    m = p.memory
    for index, entry in enumerate(entries):
        name = place_name(*m.places[index])
        if m.slot_map:
            arrays[name + ".slot_map"] = _slot_map(name + MAP, arrays.pop(name + MAP))
        for ours, pieces, _ in _pieces(m, p.d_model) if m.has_network else ():
            rows = [arrays.pop(_query(name) + piece) for piece in pieces]
            rows = [row[:, :, 0] if row.ndim == 3 else row for row in rows]
            arrays[_query(name) + ours] = rows[0] if len(rows) == 1 else np.concatenate(rows)
        if "values_of" in entry:
            drop_copy(arrays, name + TABLE, place_name(*m.places[0]) + TABLE, "mem_share_values")
        else:
            arrays[name + TABLE] = arrays[name + TABLE][:entry["n_slot"]]
