"""Passes of fixed shapes, recorded once and replayed, which leaves the host less to do."""
