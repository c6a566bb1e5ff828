// SPDX-License-Identifier: Apache-2.0
// The two hot loops of the clockwork witness: write KV cells, and check them. See cells.py for the contract.
#include <stdint.h>

typedef struct {
  uint8_t *base;
  int64_t block_stride, head_stride, token_stride; // bytes
  int64_t block_size, heads, words;
} cells_t;

typedef struct {
  int64_t position, head, byte; // of the first bad cell
  uint64_t found, expected;     // the first wrong word of it
  uint64_t digest;              // over all words of all bad cells
} finding_t;

void clockwork_fill(const cells_t *c, const int64_t *slots, int64_t count, const uint64_t *hashes,
                    const uint64_t *tags, const uint64_t *basis) {
  for (int64_t h = 0; h < c->heads; h++) {
    const uint64_t *b = basis + h * c->words;
    for (int64_t t = 0; t < count; t++) {
      uint64_t *cell = (uint64_t *)(c->base + (slots[t] / c->block_size) * c->block_stride +
                                    h * c->head_stride + (slots[t] % c->block_size) * c->token_stride);
      uint64_t hash = hashes[t];
      for (int64_t j = 0; j < c->words; j++) cell[j] = hash ^ b[j];
      cell[1] = tags[t] ^ b[1];
    }
  }
}

int64_t clockwork_check(const cells_t *c, const int32_t *blocks, int64_t first, int64_t last,
                        const uint64_t *hashes, const uint64_t *tags, const uint64_t *basis, finding_t *out) {
  int64_t bad = 0, found = 0;
  uint64_t digest = 0;
  for (int64_t h = 0; h < c->heads; h++) {
    const uint64_t *b = basis + h * c->words;
    for (int64_t t = first; t < last; t++) {
      const uint64_t *cell = (const uint64_t *)(c->base + blocks[t / c->block_size] * c->block_stride +
                                                h * c->head_stride + (t % c->block_size) * c->token_stride);
      uint64_t hash = hashes[t], wrong = (cell[0] ^ b[0] ^ hash) | (cell[1] ^ b[1] ^ tags[t]);
      for (int64_t j = 2; j < c->words; j++) wrong |= cell[j] ^ b[j] ^ hash;
      if (!wrong) continue;
      for (int64_t j = 0; j < c->words; j++) {
        uint64_t expected = b[j] ^ (j == 1 ? tags[t] : hash), difference = cell[j] ^ expected;
        if (!found && difference) {
          *out = (finding_t){t, h, j * 8 + __builtin_ctzll(difference) / 8, cell[j], expected, 0};
          found = 1;
        }
        digest = (digest ^ cell[j]) * 0x9E3779B97F4A7C15ULL + 1;
      }
      bad++;
    }
  }
  out->digest = digest;
  return bad;
}
