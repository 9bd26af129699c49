"""Terms of the code, and the corresponding symbols of the paper (arXiv 2603.03251).

| our name            | paper   | meaning                                                          |
|---------------------|---------|------------------------------------------------------------------|
| stack               |         | the processes that serve one pair: verifier, drafter,            |
|                     |         | orchestrator, supervisor, perhaps a gateway                      |
| verifier, drafter   |         | the processes that run the target and that draft                 |
| rank                |         | one of several processes that a target is spread over            |
| lifeline            |         | a pipe whose end of file shows a child that its parent is gone   |
| verify latency      | T_v(m)  | time of a verification of m tokens                               |
| step latency        | T_d(B)  | time of one depth of B branches                                  |
| pass                |         | one forward pass of a model; its rows are its tokens             |
| few rows            |         | a pass over a handful of tokens, as verifications are            |
| slot                |         | place of one token's keys and values in a buffer                 |
| granted, free run   |         | tokens of plain decoding that the verifier may go on to decode   |
|                     |         | without being asked for each                                     |
| launched beforehand |         | a pass that waits on the GPU for its tokens                      |
| origin              |         | where a chain came from: hit, miss, lookup, target               |
| committed           |         | tokens that are final                                            |
| target, draft model | p, q    | models; also their next-token distributions, temperature and     |
|                     |         | filters applied                                                  |
| num_draft_tokens    | K       | most draft tokens that a round offers                            |
| chain               |         | pending token followed by the draft tokens now being verified    |
| token tree          |         | several drafts with shared prefixes after the pending token:     |
|                     |         | a chain that forks                                               |
| node, row           |         | one token of it; its index, the pending token's is 0             |
| sibling             |         | an alternative candidate at the position of a draft token        |
| round               | T       | one verification by the target                                   |
| accepted            | k       | accepted draft tokens of a round, 0..K                           |
| bonus token         | t*      | token that the target adds: the correction if k < K, one more    |
|                     |         | if k = K                                                         |
| pending token       |         | the last bonus token: emitted, but not yet in any KV cache       |
| outcome             | (k, t*) | result of a verification; of a tree, the last accepted node      |
|                     |         | and the bonus token                                              |
| speculation cache   | S       | map outcome -> prepared draft                                    |
| hit, miss           | p_hit   | the outcome was, or was not, in S when the verification ended    |
| fan-out             | F_k     | outcomes prepared for each acceptance length k: a list           |
| branches            | B       | outcomes prepared in a round: the sum of the fan-out             |
| branch              |         | one prepared draft: the continuation of one outcome              |
| trunk               |         | committed tokens and the chain, which all branches continue      |
| depth               |         | draft tokens per branch                                          |
| acceptance rate     | alpha   | probability that a draft token is accepted                       |
| coupled, rejection  |         | the acceptance rules (`decoding/sampler.py`,                     |
|                     |         | `decoding/rejection.py`)                                         |
| saguaro, held back  | C, F    | weight, and number, of the best tokens that a draft holds back   |
|                     |         | so that a rejection ends in one of them                          |
| prompt lookup       |         | drafts without a model: an earlier continuation of these tokens  |
| backup              |         | the draft after a miss, for which the target waits               |
| plain decoding      |         | one token a round, no draft                                      |
| prefill             |         | feeding the prompt to a model                                    |
| prefix cache        |         | KV of finished sequences, for prompts with the same prefix       |
| peer                |         | the process at the other end of a connection                     |
| host                |         | of a draft server, the program that it drafts for; of a GPU, the |
|                     |         | CPU side; of ranks, a machine                                    |
| backend             |         | a way to draft: mlx, head, coreml, ngram, stdio, remote          |
| head                |         | a small published drafter that reads the target's hidden states  |
| fallback            |         | a round without the drafter, for a reason that is counted        |

`position` is always the index of a token in the whole sequence, prompt included, from 0.
"""
