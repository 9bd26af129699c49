"""The drafter: prepares drafts for the outcomes of the verification in flight."""
