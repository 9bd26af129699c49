"""The words of the code, with the paper's symbols beside them (arXiv 2603.03251).

| our name         | paper    | meaning                                                            |
|------------------|----------|--------------------------------------------------------------------|
| target, draft    | p, q     | models; `p`, `q` their next-token laws after temperature, filters  |
| lookahead        | K        | draft tokens offered per round                                     |
| chain            |          | pending token followed by the draft tokens now being verified      |
| round            | T        | one target verification                                            |
| accepted         | k        | accepted draft tokens of a round, 0..K                             |
| bonus token      | t*       | token the target adds: the correction when k < K, one more if k = K|
| pending token    |          | the last bonus token: emitted, but not yet in any KV cache         |
| outcome          | (k, t*)  | what a verification returns                                        |
| speculation cache| S        | map outcome -> prepared draft                                      |
| fan-out          | F_k      | bonus-token candidates prepared at acceptance length k; B = sum F_k|
| branch           |          | one prepared draft: the continuation of one outcome                |
| depth            |          | draft tokens per branch so far                                     |
| acceptance rate  | alpha    | probability that a draft token is accepted                         |
| hit, miss        | p_hit    | the outcome was, was not in S when the verification ended          |
| coupled, rejection|         | the acceptance rules (`law.py`, `rejection.py`)                    |
| held back, saguaro| F, C    | best tokens that a draft is drawn from less often, and by how much |
| backup           |          | what drafts after a miss                                           |
| prefill          |          | feeding the prompt to a model                                      |

`position` is always the index of a token in the whole sequence, prompt included, from 0.
"""
