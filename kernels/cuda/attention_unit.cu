/* How the splits of a step's rows are shared out among blocks, and the scratch that their parts
 * take: the host's half of attention.cu and attention_drawn.cu.
 *
 * The rows of drawn tokens are shared out so that each multiprocessor has a block, but a row only
 * where that spares its block SPARED_MIN splits: to merge through memory takes some 1.5 µs, in
 * which a multiprocessor reads 8 splits of BF16 and 64 columns, of 8 KB, by estimate at 40 GB/s.
 * With 16 heads on 132 multiprocessors a row stands alone up to 288 positions, each of 4 equal ones
 * up to 384, each of 8 however long they are.
 *
 * Of rows of requests on tensor cores tiles that see several parts are shared out, where two blocks
 * for each multiprocessor are otherwise not there, or some would work far longer than the
 * others. */
#include "kernels/cuda/attention.cuh"

namespace
{

constexpr int PART_ROWS = 64;               /* most rows of requests whose splits are spread */
constexpr size_t PART_BYTES_MAX = 64 << 20; /* of scratch for these, unless one row needs more */
constexpr int BLOCKS_PER_SM = 16;     /* of requests, wanted: two rounds of what an SM holds */
constexpr int TILE_BLOCKS_PER_SM = 2; /* of tiles on tensor cores, wanted */
constexpr int SPARED_MIN = 8;         /* splits of a drawn row, see above */

/* Whether a step's rows are shared out at all. Those that span.cu attends with are not: they see a
 * span, however far they are, and their pages form a ring, which ends long before their positions
 * do. */
bool has_units(const struct step_limits *l)
{
    return l->n_head > 0 && l->n_span_max == 0;
}

/* Most rows of a step that are spread. */
int spread_rows(const struct step_limits *l, bool is_drawn)
{
    if (is_drawn) {
        return l->n_seq_max < l->n_tok_max ? l->n_seq_max : l->n_tok_max;
    }
    const size_t one_bytes =
        attention_part_bytes(1, attention_part_max(l->n_page_max, false), l->d_model, l->n_head);
    const size_t n_fit = PART_BYTES_MAX / (one_bytes > 0 ? one_bytes : 1);
    const int n = n_fit < 1 ? 1 : n_fit < PART_ROWS ? static_cast<int>(n_fit) : PART_ROWS;
    return n < l->n_tok_max ? n : l->n_tok_max;
}

int split_count(int n_pos, bool is_drawn)
{
    return is_drawn ? drawn_splits_of(n_pos) : splits_of(n_pos);
}

/* A row that sees n_pos positions, cut into units of at least share splits where it has as many. */
struct cut {
    int run; /* splits of a part */
    int n_part, n_unit;
};

struct cut cut_of(int n_pos, bool is_drawn, int share)
{
    const int n_split = split_count(n_pos, is_drawn);
    const int run = is_drawn ? (n_split + PART_MAX - 1) / PART_MAX : 1;
    const int n_part = (n_split + run - 1) / run;
    if (is_drawn && n_split - share < SPARED_MIN) {
        return {run, n_part, 1};
    }
    const int n_each = (share + run - 1) / run; /* parts of a unit */
    return {run, n_part, (n_part + n_each - 1) / n_each};
}

/* The least share with which the rows have n_unit units at most, nearly; of drawn ones such as the
 * units beyond one a row would have if they took all. */
int share_of(const struct step *step, int n_unit)
{
    int64_t n_split = 0;
    for (int r = 0; r < step->n_tok; r++) {
        n_split += split_count(step->pos[r] + 1, step->is_drawn);
    }
    const int64_t n_beyond = n_unit > step->n_tok ? n_unit - step->n_tok : 1;
    for (int64_t share = step->is_drawn ? (n_split + n_beyond - 1) / n_beyond : 1;;) {
        int64_t n = 0;
        for (int r = 0; r < step->n_tok; r++) {
            n += cut_of(step->pos[r] + 1, step->is_drawn, static_cast<int>(share)).n_unit;
        }
        if (n <= n_unit) {
            return static_cast<int>(share);
        }
        const int64_t more = share + (share + 7) / 8;
        share = more > n_split / n_unit ? more : n_split / n_unit;
    }
}

/* The first pages of a drawn token's unit, which begins at a split; 0 where it has no more. */
void unit_pages(const struct step *step, struct attention_unit *unit)
{
    const int first = unit->first * (DRAWN_SPLIT / KV_PAGE);
    const int n_page = (unit->n_pos + KV_PAGE - 1) / KV_PAGE;
    const int32_t *const page =
        step->page + static_cast<int64_t>(unit->seq) * step->limits.n_page_max;
    for (int i = 0; i < UNIT_PAGES && first + i < n_page; i++) {
        unit->page[i] = page[first + i];
    }
}

} // namespace

int attention_part_max(int n_page_max, bool is_drawn)
{
    const int pages = (is_drawn ? DRAWN_SPLIT : SPLIT) / KV_PAGE;
    const int n_split = (n_page_max + pages - 1) / pages;
    return is_drawn && n_split > PART_MAX ? PART_MAX : n_split;
}

size_t attention_part_bytes(int64_t n_row, int n_part_max, int64_t d_model, int n_head)
{
    if (n_head == 0) {
        return 0;
    }
    const size_t d_pad = static_cast<size_t>(d_model / n_head + 3) / 4 * 4;
    const size_t one_bytes = sizeof(struct softmax_part) + d_pad * sizeof(float);
    return static_cast<size_t>(n_row * n_head) * static_cast<size_t>(n_part_max) * one_bytes;
}

int attention_unit_count(const struct cuda *cu, const struct step_limits *l, int n_row,
                         bool is_drawn)
{
    if (!has_units(l) || n_row > spread_rows(l, is_drawn)) {
        return 0;
    }
    const int wanted = n_row + (is_drawn ? cu->n_sm / l->n_head
                                         : (BLOCKS_PER_SM * cu->n_sm + l->n_head - 1) / l->n_head);
    const int64_t most = static_cast<int64_t>(n_row) * attention_part_max(l->n_page_max, is_drawn);
    return wanted < most ? wanted : static_cast<int>(most);
}

int attention_unit_max(const struct cuda *cu, const struct step_limits *l)
{
    const int drawn = attention_unit_count(cu, l, spread_rows(l, true), true);
    const int asked = attention_unit_count(cu, l, spread_rows(l, false), false);
    return drawn > asked ? drawn : asked;
}

void attention_units(const struct step *step, struct attention_unit *unit, int n_unit)
{
    const int share = n_unit > 0 ? share_of(step, n_unit) : 0;
    int n = 0;
    for (int seq = 0; n_unit > 0 && seq < step->n_seq; seq++) {
        for (int row = step->seq_first[seq]; row < step->seq_first[seq + 1]; row++) {
            const int n_pos = step->pos[row] + 1;
            const int n_split = split_count(n_pos, step->is_drawn);
            const struct cut cut = cut_of(n_pos, step->is_drawn, share);
            int part = 0;
            for (int i = 1; i <= cut.n_unit; i++) {
                const int next =
                    static_cast<int>(static_cast<int64_t>(cut.n_part) * i / cut.n_unit);
                const int end = next * cut.run;
                unit[n] = {
                    row,  seq,        n_pos, part * cut.run, end < n_split ? end : n_split, cut.run,
                    part, cut.n_unit, {}};
                if (step->is_drawn) {
                    unit_pages(step, &unit[n]);
                }
                n++;
                part = next;
            }
        }
    }
    for (; n < n_unit; n++) {
        unit[n] = {};
    }
}

/* ---- tiles ----------------------------------------------------------------------------------- */

namespace
{

/* Blocks of a head that tiles have beyond one each, at most. */
int tile_extra(const struct cuda *cu, int n_head)
{
    return TILE_BLOCKS_PER_SM * cu->n_sm / n_head + 1;
}

/* Parts of tiles that have room in so many bytes, all heads of each. */
size_t tile_parts(const struct step_limits *l, size_t part_bytes)
{
    const size_t one_bytes = attention_mma_part_bytes(l->d_model / l->n_head);
    return part_bytes / (one_bytes * static_cast<size_t>(l->n_head));
}

/* Calls use(seq, row, n_row, n_split) for the tiles of a step, of a sequence the longest first. */
template <class Use> void tiles_visit(const struct step *step, const Use &use)
{
    for (int seq = 0; seq < step->n_seq; seq++) {
        const int first = step->seq_first[seq];
        const int end = step->seq_first[seq + 1];
        for (int row = first + (end - first - 1) / MMA_ROWS * MMA_ROWS; row >= first;
             row -= MMA_ROWS) {
            const int n_row = end - row < MMA_ROWS ? end - row : MMA_ROWS;
            use(seq, row, n_row, splits_of(step->pos[row] + n_row));
        }
    }
}

} // namespace

int attention_tile_max(const struct cuda *cu, const struct step_limits *l)
{
    return !has_units(l) ? 0 : l->n_tok_max / MMA_ROWS + l->n_seq_max + tile_extra(cu, l->n_head);
}

/* What is longer than the mean comes first, so that nothing long is left at the end. */
int attention_tiles(const struct cuda *cu, const struct step *step, size_t part_bytes,
                    struct attention_tile *tile)
{
    const struct step_limits *const l = &step->limits;
    if (step->is_drawn || !has_units(l)) {
        return 0;
    }
    int64_t all = 0; /* splits */
    int64_t n_all = 0;
    tiles_visit(step, [&](int, int, int, int n_split) {
        all += n_split;
        n_all++;
    });
    const int64_t n_block_all = TILE_BLOCKS_PER_SM * static_cast<int64_t>(cu->n_sm);
    const int64_t n_each = all * l->n_head / (n_block_all * MMA_RUN) + 1; /* parts of a block */
    size_t part = 0;
    int n_extra = 0;
    int n = 0;
    for (int is_short = 0; is_short < 2; is_short++) {
        tiles_visit(step, [&](int seq, int row, int n_row, int n_split) {
            if ((n_split * n_all < all) != (is_short == 1)) {
                return;
            }
            const int n_part = (n_split + MMA_RUN - 1) / MMA_RUN;
            int n_block = static_cast<int>((n_part + n_each - 1) / n_each);
            if (part + static_cast<size_t>(n_part) > tile_parts(l, part_bytes) ||
                n_extra + n_block - 1 > tile_extra(cu, l->n_head)) {
                n_block = 1;
            }
            for (int i = 0; tile != NULL && i < n_block; i++) {
                const auto border = [&](int b) {
                    return static_cast<int>(static_cast<int64_t>(n_part) * b / n_block);
                };
                tile[n + i] = {row,       n_row,         seq,     n_split,
                               border(i), border(i + 1), n_block, static_cast<int>(part)};
            }
            n += n_block;
            n_extra += n_block - 1;
            part += n_block > 1 ? static_cast<size_t>(n_part) : 0;
        });
    }
    return n;
}

/* ---- scratch --------------------------------------------------------------------------------- */

size_t attention_scratch(const struct step_limits *l)
{
    if (!has_units(l)) {
        return 0;
    }
    size_t most = 0;
    for (int is_drawn = 0; is_drawn < 2; is_drawn++) {
        const size_t bytes = attention_part_bytes(spread_rows(l, is_drawn == 1),
                                                  attention_part_max(l->n_page_max, is_drawn == 1),
                                                  l->d_model, l->n_head);
        most = bytes > most ? bytes : most;
    }
    return (most + 15) / 16 * 16;
}

/* One of each head for each row that is spread, or each part of tiles. */
size_t attention_counters(const struct step_limits *l)
{
    if (!has_units(l)) {
        return 0;
    }
    size_t most = tile_parts(l, attention_scratch(l));
    for (int is_drawn = 0; is_drawn < 2; is_drawn++) {
        const size_t n_row = static_cast<size_t>(spread_rows(l, is_drawn == 1));
        most = n_row > most ? n_row : most;
    }
    return most * static_cast<size_t>(l->n_head);
}
