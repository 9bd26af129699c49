"""What each helper process is asked, and what it answers: typed JSON lines."""
