/* How the splits of a step's rows are shared out among blocks, and the scratch that their parts take:
 * the host's half of attention.cu and attention_drawn.cu.
 *
 * The rows of drawn tokens are shared out so that each multiprocessor has a block, but a row only where
 * that spares its block SPARED_MIN splits: to merge through memory takes some 1.5 µs, in which a
 * multiprocessor reads 8 splits of BF16 and 64 columns, of 8 KB, by estimate at 40 GB/s. With 16
 * heads on 132 multiprocessors a row stands alone up to 288 positions, each of 4 equal ones up to 384,
 * each of 8 however long they are. */
#include "kernels/cuda/attention.cuh"

namespace
{

constexpr int PART_ROWS = 64;               /* most rows of requests whose splits are spread */
constexpr size_t PART_BYTES_MAX = 64 << 20; /* of scratch for these, unless one row needs more */
constexpr int BLOCKS_PER_SM = 16; /* of requests, wanted: two rounds of what an SM holds */
constexpr int SPARED_MIN = 8;     /* splits of a drawn row, see above */

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
    if (l->n_head == 0 || n_row > spread_rows(l, is_drawn)) {
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

size_t attention_scratch(const struct step_limits *l)
{
    if (l->n_head == 0) {
        return 0;
    }
    size_t most = 0;
    int n_row_max = 0;
    for (int is_drawn = 0; is_drawn < 2; is_drawn++) {
        const int n_row = spread_rows(l, is_drawn == 1);
        const size_t bytes = attention_part_bytes(
            n_row, attention_part_max(l->n_page_max, is_drawn == 1), l->d_model, l->n_head);
        most = bytes > most ? bytes : most;
        n_row_max = n_row > n_row_max ? n_row : n_row_max;
    }
    const size_t n_item = static_cast<size_t>(n_row_max) * static_cast<size_t>(l->n_head);
    return most + n_item * sizeof(unsigned);
}
