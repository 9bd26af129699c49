"""The verifier: the target model, and its judgement of drafts."""
