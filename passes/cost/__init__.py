"""What a program sends, computes and keeps, and how long it takes."""
