/* A drafter in C that speaks the messages of docs/guide/draft-server.md, msgpack by hand.
 *
 * It drafts what followed the last time two tokens were said: one branch per acceptance
 * length, one sequence (the newest).
 *     cc -O2 -o message_drafter message_drafter.c
 *     ssd generate "..." --draft-command ./message_drafter
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 17, ENDED = -1 };
typedef struct { long n, at[MOST]; } List;
static List tokens, chain, fan_out, other, known; /* known: the context, then a part of a chain */
static struct { long accepted, bonus, at, end; } branches[256]; /* at..end: the draft */
static char text[32], key[32], type[32];

/* ---- reading; the end of the input is a goodbye */
static uint64_t bytes(int n)
{
    uint64_t v = 0;
    for (int c; n--; v = v << 8 | (uint64_t)c)
        if ((c = getchar()) == EOF)
            exit(0);
    return v;
}

/* One value: a number is returned, an array's numbers go to `list`, a string to `text`. */
static long value(List *list)
{
    int b = (int)bytes(1), strings = (b >= 0xa0 && b < 0xc0) || (b >= 0xd9 && b <= 0xdb);
    uint64_t n = (uint64_t)(b & (b < 0xa0 ? 15 : 31));
    if (b < 0x80 || b >= 0xe0 || b == 0xc0 || b == 0xc2 || b == 0xc3)
        return (int8_t)b;
    if (b == 0xca || b == 0xcb || (b >= 0xcc && b <= 0xd3))
        return (long)bytes(b == 0xca ? 4 : b == 0xcb ? 8 : 1 << (b & 3));
    if (b >= 0xd9)
        n = bytes(b <= 0xdb ? 1 << (b - 0xd9) : b & 1 ? 4 : 2);
    if (strings)
        for (uint64_t i = text[0] = 0; i < n; i++) {
            char c = (char)bytes(1);
            if (i < 31)
                text[i] = c, text[i + 1] = 0;
        }
    else if (b < 0x90 || b >= 0xde) /* nothing of a map inside a message is needed */
        for (n *= 2; n--;)
            value(&other);
    else
        for (list->n = 0; n--;) {
            long v = value(&other);
            if (list->n < MOST)
                list->at[list->n++] = v;
        }
    return 0;
}

/* ---- writing */
static void big(int n, long v) { while (n--) putchar((int)(v >> 8 * n & 255)); }
static void string(const char *s) { putchar(0xa0 | (int)strlen(s)); fputs(s, stdout); }
static void number(long v) { putchar(0xd3); big(8, v); }
static void array(long n) { putchar(0xdd); big(4, n); }
static void field(const char *name, long v) { string(name); number(v); }
static void named(const char *name, const char *s) { string(name); string(s); }

/* ---- drafting */
static void append(const List *list, long from, long count)
{
    for (long i = from; i < from + count && i < list->n && known.n < MOST; i++)
        known.at[known.n++] = list->at[i];
}

/* What followed the last two known tokens when they were last said; the end if they were not. */
static long follower(void)
{
    for (long i = known.n - 1, *t = known.at; i >= 2; i--)
        if (t[i - 1] == t[known.n - 1] && t[i - 2] == t[known.n - 2])
            return i;
    return known.n;
}

/* The answer: one message per depth, each with one token of every branch. */
static void trees(long sequence, long round, long depth, long n)
{
    for (long d = 1; d <= depth; d++) {
        putchar(0x89), named("type", "tree");
        field("sequence", sequence), field("round", round), field("depth", d);
        field("draft_ms", 0), string("last"), putchar(d == depth ? 0xc3 : 0xc2);
        string("outcomes"), array(d == 1 ? n : 0);
        for (long i = 0; d == 1 && i < n; i++)
            array(2), number(branches[i].accepted), number(branches[i].bonus);
        string("tokens"), array(n);
        for (long i = 0, at; i < n; i++)
            at = branches[i].at + d - 1, number(at < branches[i].end ? known.at[at] : ENDED);
        string("confidences"), array(n);
        for (long i = 0; i < n; i++)
            putchar(0xca), big(4, 0x3f000000); /* 0.5 */
    }
}

static long branch(long n, long accepted, long bonus, long at)
{
    branches[n].accepted = accepted, branches[n].bonus = bonus;
    branches[n].at = at, branches[n].end = known.n;
    return n + 1;
}

static long prepare(void)
{
    long n = 0;
    for (long k = 0; k < chain.n && k < fan_out.n && n < 256; k++) {
        append(&chain, k, 1);
        long at = follower();
        int rejected = k + 1 < chain.n && at < known.n && known.at[at] == chain.at[k + 1];
        if (fan_out.at[k] > 0 && at + 1 < known.n && !rejected)
            n = branch(n, k, known.at[at], at + 1);
    }
    return n;
}

int main(void)
{
    putchar(0x8b), named("type", "hello"), field("protocol", 4), named("role", "drafter");
    field("pid", 0), named("backend", "lookup"), named("model", "");
    named("tokenizer_fingerprint", ""), field("vocabulary_size", 0);
    field("context_length", MOST - 256), named("compute_unit", "cpu");
    field("max_draft_tokens", 64);
    for (long owner = 0, length = 0;;) {
        long sequence = 0, round = 0, base = 0, depth = 0, count = 0, pending = 0, accepted = 0;
        fflush(stdout);
        long b = (long)bytes(1), fields = b < 0x90 ? b & 15 : (long)bytes(b == 0xde ? 2 : 4);
        while (fields--) {
            value(&other);
            strcpy(key, text);
            List *list = !strcmp(key, "tokens") ? &tokens : !strcmp(key, "nodes") ? &chain : &fan_out;
            long v = value(list);
            if (!strcmp(key, "type")) strcpy(type, text);
            if (!strcmp(key, "sequence")) sequence = v;
            if (!strcmp(key, "round")) round = v;
            if (!strcmp(key, "base")) base = v;
            if (!strcmp(key, "depth")) depth = v;
            if (!strcmp(key, "count")) count = v;
            if (!strcmp(key, "pending")) pending = v;
            if (!strcmp(key, "accepted")) accepted = v;
        }
        if (!strcmp(type, "stop") || !strcmp(type, "rejected"))
            return 0;
        int opens = !strcmp(type, "open"), prepares = !strcmp(type, "prepare");
        if (!opens && !prepares && strcmp(type, "draft"))
            continue;
        if (opens)
            owner = sequence, base = length = 0;
        if (sequence != owner || base > length) {
            putchar(0x83), named("type", "failed"), field("sequence", sequence);
            named("error", "one sequence at a time");
            continue;
        }
        known.n = base, append(&tokens, 0, tokens.n), length = known.n;
        if (opens) {
            putchar(0x84), named("type", "prefilled"), field("sequence", sequence);
            field("length", length), field("prefill_ms", 0);
        } else if (prepares) {
            long n = prepare();
            if (n)
                trees(sequence, round, depth, n);
        } else {
            known.at[known.n++] = pending;
            trees(sequence, round, count, branch(0, accepted, pending, follower()));
        }
        known.n = length;
    }
}
