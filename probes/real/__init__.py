"""What a real trainer has around it inside a worker: its models and data, its engine, and what sees its memory."""
