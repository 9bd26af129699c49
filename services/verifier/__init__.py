"""The verifier: the target model, and the acceptance of drafts."""
