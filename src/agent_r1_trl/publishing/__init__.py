"""What is sent to the Hub: the files of a run, and the card that describes them."""
