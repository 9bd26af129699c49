"""`ssd bench`: what is measured, how it is summed up, and how it is shown."""
