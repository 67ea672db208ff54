"""Small trainings that nothing here was tuned on, and a contest of searches over them."""
