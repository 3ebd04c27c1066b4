"""On-policy data: whoever is to be drafted for answers the prompts of others again.

`run` takes conversations through any `Answerer`, one turn after the other; `journal` keeps every
answer as it comes, so that a killed run goes on; `tokens`, `server` and `vllm_answers` answer.
"""
