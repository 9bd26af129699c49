/* Keys and values in their slots, halves or floats, and tiles of them as floats. */

enum {
    SLOTS = 32, /* of a tile */
    LINE = 64   /* bytes that are fetched together */
};

/* Floats to halves, to the nearest one, ties to even. What no half can hold becomes NaN: softmax
 * would hide an infinite score, and NaN ends as a sentence. */
static void keep_halves(int count, const float *from, uint16_t *to)
{
    for (int i = 0; i < count; i += LANES) {
        float whole[LANES] = {0};
        uint16_t halves[LANES];
        int some = count - i < LANES ? count - i : LANES;
        memcpy(whole, from + i, sizeof *whole * some);
        vf_to_halves(vf_load(whole), halves);
        for (int l = 0; l < LANES; l++)
            halves[l] |= (halves[l] & 0x7fff) == 0x7c00 ? 0x200 : 0;
        memcpy(to + i, halves, sizeof *halves * some);
    }
}

/* Keys or values of a head to their slot. */
static void keep(int number, int size, const float *from, uint8_t *slot)
{
    if (number == HALF)
        keep_halves(size, from, (uint16_t *)slot);
    else
        memcpy(slot, from, sizeof *from * size);
}

/* Where the slots of a register begin; those from `count` on are the last one again. */
INLINE void find_slots(const uint8_t *first, size_t each, int count, const uint8_t **slots)
{
    for (int i = 0; i < SIDE; i++)
        slots[i] = first + (i < count ? i : count - 1) * each;
}

/* Eight halves of SIDE keys, side by side. */
INLINE void turn_eight(const uint8_t *const *slots, size_t at, uint16_t *to)
{
    vh x[8], y[8];
    UNROLLED for (int i = 0; i < 8; i++)
        x[i] = vh_load(slots, i, at);
    UNROLLED for (int round = 0; round < 3; round++) {
        UNROLLED for (int i = 0; i < 4; i++) {
            y[2 * i] = zip_low(x[i], x[i + 4]);
            y[2 * i + 1] = zip_high(x[i], x[i + 4]);
        }
        UNROLLED for (int i = 0; i < 8; i++)
            x[i] = y[i];
    }
    UNROLLED for (int i = 0; i < 8; i++)
        vh_store(x[i], to + i * SLOTS);
}

/* Keys of `count` slots to [size, SLOTS]; behind them is anything. */
static void turn_keys(int number, const uint8_t *keys, int size, int count, uint8_t *to)
{
    const size_t each = size * bytes_of(number), half = sizeof(uint16_t);
    const uint8_t *slots[SIDE];
    int turned = number == HALF ? size / 8 * 8 : 0;
    for (int s = 0; s < count; s += SIDE) {
        find_slots(keys + s * each, each, count - s, slots);
        for (int d = 0; d < turned; d += 8) {
            for (int i = 0; i < SIDE && d * half % LINE == 0; i++)
                __builtin_prefetch(slots[i] + d * half + each * SLOTS);
            turn_eight(slots, d * half, (uint16_t *)to + d * SLOTS + s);
        }
    }
    for (int s = 0; s < count; s++)
        for (int d = turned; d < size; d++)
            memcpy(to + (d * SLOTS + s) * bytes_of(number), keys + s * each + d * bytes_of(number),
                   bytes_of(number));
}

/* Elements of a head in a tile of floats: whole registers, the last one filled up with zeros. */
INLINE int padded(int size) { return (size + LANES - 1) / LANES * LANES; }

/* Rows of `size` numbers to rows of floats. */
static void read_numbers(int number, const uint8_t *from, int rows, int size, float *to)
{
    for (int r = 0; r < rows; r++, from += size * bytes_of(number), to += padded(size))
        for (int i = 0; i < size; i += LANES) {
            uint8_t whole[4 * LANES] = {0};
            const uint8_t *own = from + i * bytes_of(number);
            if (size - i < LANES)
                own = memcpy(whole, own, (size - i) * bytes_of(number));
            vf_store(number == HALF ? vf_of(HALF, own) : vf_of(FLOAT, own), to + i);
        }
}
