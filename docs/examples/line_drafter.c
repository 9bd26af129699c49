/* The smallest drafter: the line protocol of docs/guide/draft-server.md, in C.
 *
 * It drafts what followed the last time the context's last two tokens were said.
 *     cc -O2 -o line_drafter line_drafter.c
 *     ssd generate "..." --draft-command ./line_drafter --draft-lines
 */
#include <stdio.h>
#include <string.h>

static int context[1 << 20];
static int length;

/* The latest place whose two tokens before it are the context's last two; else the end. */
static int follower(void)
{
    for (int i = length - 1; i >= 2; i--)
        if (context[i - 1] == context[length - 1] && context[i - 2] == context[length - 2])
            return i;
    return length;
}

int main(void)
{
    char line[256];
    int token, count;

    setvbuf(stdout, NULL, _IOLBF, 0); /* the host waits for each line */
    puts("READY");
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "DRAFT %d %d", &token, &count) == 2) {
            if (length == sizeof context / sizeof *context) {
                puts("ERROR the context is full");
                continue;
            }
            context[length++] = token; /* only what was sent stays in the context */
            int start = follower();
            printf("TOKENS ");
            for (int i = start; i < start + count && i < length; i++)
                printf("%s%d", i > start ? "," : "", context[i]);
            puts(" 0.0ms");
        } else if (!strcmp(line, "RESET\n")) {
            length = 0;
            puts("OK");
        } else if (!strcmp(line, "PING\n")) {
            puts("PONG");
        } else if (!strcmp(line, "BENCH\n")) {
            puts("BENCH 0 0.0ms");
        } else if (!strcmp(line, "QUIT\n")) {
            break;
        } else {
            puts("ERROR known are: DRAFT <token> <n>, RESET, PING, BENCH, QUIT");
        }
    }
    return 0; /* the end of the input is a goodbye */
}
