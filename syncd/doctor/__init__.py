"""`syncd doctor`: what is wrong with an end's set-up, in plain words, and drills that injure it."""
