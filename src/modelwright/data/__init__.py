"""Text to documents, documents to tokens, tokens to batches that resume.

`sources` reads documents, `clean` decides which ones are kept, `tokenizer` turns them into token ids, and `rows` packs
these and makes batches of them. `images` and `augment` serve several of these steps.
"""
