// Messages of `sparse_codec.py`, which describes them: the same bytes as its NumPy references, in one pass over the
// values instead of some thirty. A result of -1 leaves the case to the reference: what is not finite, too large for
// 32 bits, or no message at all.

#pragma once

#include "vectors.h"

namespace {

constexpr int kAll = 255, kBitmap = 254;  // kinds of place codes; below kBlocks the number of low bits of a Rice code
constexpr int kBlocks = 128, kBlockCodes = 22, kBlockBits = 5, kBlockValues = 1 << kBlockBits, kMostCodeBits = 12;
constexpr int kMaxLevels = 8;
constexpr int64_t kLevelBytes = 9, kMovesBytes = 6, kListBytes = 5;

inline void write_32(uint8_t* to, uint32_t value) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(value >> 8 * i);
}
inline uint32_t read_32(const uint8_t* from) {
  return from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24;
}
inline uint32_t magnitude_bits(float value) {  // ordered as the magnitudes are; from kInfinite on they are not finite
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits & 0x7fffffff;
}
constexpr uint32_t kInfinite = 0x7f800000;
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Bits, most significant first.
struct BitWriter {
  uint8_t* to;
  uint64_t held = 0;
  int num_held = 0;

  void put(uint64_t value, int num_bits) {  // at most 32 of them
    held = held << num_bits | value;
    num_held += num_bits;
    if (num_held < 32) return;
    num_held -= 32;
    const uint32_t word = __builtin_bswap32(static_cast<uint32_t>(held >> num_held));
    std::memcpy(to, &word, 4);
    to += 4;
  }
  void put_unary(uint32_t zeros) {  // and the one that ends them
    for (; zeros >= 32; zeros -= 32) put(0, 32);
    put(1, static_cast<int>(zeros) + 1);
  }
  uint8_t* end() {  // the last byte is filled up with zeros
    for (; num_held > 0; num_held -= 8)
      *to++ = static_cast<uint8_t>(num_held >= 8 ? held >> (num_held - 8) : held << (8 - num_held));
    return to;
  }
};

// Writes one bit for each number below `count`.
template <typename Bit>
uint8_t* write_single_bits(int64_t count, uint8_t* to, Bit bit) {
  for (int64_t i = 0; i < count; i += 8) {
    unsigned byte = 0;
    if (count - i >= 8) {
      for (int j = 0; j < 8; ++j) byte |= bit(i + j) << (7 - j);
    } else {
      for (int j = 0; j < count - i; ++j) byte |= bit(i + j) << (7 - j);
    }
    *to++ = static_cast<uint8_t>(byte);
  }
  return to;
}

struct BitReader {
  const uint8_t* from;
  uint64_t held = 0;
  int num_held = 0;

  uint32_t get(int num_bits) {  // at most 31 of them
    for (; num_held < num_bits; num_held += 8) held = held << 8 | *from++;
    num_held -= num_bits;
    return static_cast<uint32_t>(held >> num_held) & ((1u << num_bits) - 1);
  }
};

// Positions of the ones, of `most` at most. Returns their number, which is `most + 1` if there are more.
template <typename Index>
int64_t find_ones(const uint8_t* from, int64_t num_bytes, int64_t most, Index* to) {
  int64_t num_found = 0;
  for (int64_t first = 0; first < num_bytes; first += 8) {
    uint64_t word = 0;
    std::memcpy(&word, from + first, std::min<int64_t>(8, num_bytes - first));
    // The first bit of each byte becomes its lowest: finding and clearing a lowest bit takes a cycle.
    word = (word >> 1 & 0x5555555555555555) | (word & 0x5555555555555555) << 1;
    word = (word >> 2 & 0x3333333333333333) | (word & 0x3333333333333333) << 2;
    word = (word >> 4 & 0x0f0f0f0f0f0f0f0f) | (word & 0x0f0f0f0f0f0f0f0f) << 4;
    for (; word; word &= word - 1) {
      if (num_found == most) return most + 1;
      to[num_found++] = static_cast<Index>(8 * first + __builtin_ctzll(word));
    }
  }
  return num_found;
}

// Values as the low bits of each, then the rest of each in unary.
struct RiceCode {
  int low;
  int64_t num_bits;
};

inline RiceCode rice_code(const int32_t* values, int64_t count) {
  const auto bits_with = [=](int low) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += values[i] >> low;
    return sum + count * (1 + low);
  };
  if (!count) return {0, 0};
  const double mean = static_cast<double>(bits_with(0) - count) / static_cast<double>(count);
  const int guess = static_cast<int>(std::log2(std::max(1.0, mean)));
  RiceCode best{-1, 0};
  for (int low = std::max(0, guess - 1); low <= guess + 1; ++low) {
    const int64_t bits = bits_with(low);
    if (best.low < 0 || bits < best.num_bits) best = {low, bits};
  }
  return best;
}

inline uint8_t* write_rice(const int32_t* values, int64_t count, int low, uint8_t* to) {
  if (low == 1) {
    to = write_single_bits(count, to, [=](int64_t i) { return values[i] & 1u; });
  } else if (low) {
    BitWriter lows{to};
    for (int64_t i = 0; i < count; ++i) lows.put(values[i] & ((1u << low) - 1), low);
    to = lows.end();
  }
  BitWriter unary{to};
  for (int64_t i = 0; i < count; ++i) unary.put_unary(static_cast<uint32_t>(values[i]) >> low);
  return unary.end();
}

// Calls `take(i, value)` for each value. ends: room for `count` numbers, of which each is read before its `take`.
// Returns the bytes that the values take, -1 if some are missing.
template <typename Index, typename Take>
int64_t read_rice(const uint8_t* from, int64_t num_bytes, int64_t count, int low, Index* ends, Take take) {
  const int64_t split = (count * low + 7) / 8;
  if (low > 31 || split > num_bytes || find_ones(from + split, num_bytes - split, count, ends) < count) return -1;
  BitReader lows{from};
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t end = ends[i];
    take(i, (end - last - 1) << low | lows.get(low));
    last = end;
  }
  return split + (last + 8) / 8;
}

// Calls `take(blocks, num)` with up to 8 blocks at a time, the first in the highest of 40 bits; `from` is read 3 bytes
// too far.
template <typename Take>
void for_blocks(const uint8_t* from, int64_t num_blocks, Take take) {
  for (; num_blocks > 0; num_blocks -= 8, from += kBlockBits) {
    uint64_t word;
    std::memcpy(&word, from, 8);
    take(__builtin_bswap64(word) >> 24, static_cast<int>(std::min<int64_t>(8, num_blocks)));
  }
}
inline int block_of(uint64_t blocks, int which) { return blocks >> kBlockBits * (7 - which) & (kBlockValues - 1); }

// Blocks of a bitmap by the code that takes least. codes: for each code and block 16 times the word plus its length.
struct BlockCode {
  const uint16_t* codes;
  int which = 0;
  int64_t num_bits = std::numeric_limits<int64_t>::max();

  void choose(const uint8_t* bitmap, int64_t num_blocks) {
    int64_t counts[2][kBlockValues] = {};  // two, because neighbors are often equal and a sum must wait for the last
    for_blocks(bitmap, num_blocks, [&](uint64_t blocks, int num) {
      for (int i = 0; i < num; ++i) ++counts[i & 1][block_of(blocks, i)];
    });
    for (int code = 0; code < kBlockCodes; ++code) {
      int64_t bits = 0;
      for (int block = 0; block < kBlockValues; ++block)
        bits += (codes[code * kBlockValues + block] & 15) * (counts[0][block] + counts[1][block]);
      if (bits < num_bits) which = code, num_bits = bits;
    }
  }
  uint8_t* write(const uint8_t* bitmap, int64_t num_blocks, uint8_t* to) const {
    BitWriter out{to};
    const uint16_t* const words = codes + which * kBlockValues;
    for_blocks(bitmap, num_blocks, [&](uint64_t blocks, int num) {
      for (int i = 0; i < num; ++i) out.put(words[block_of(blocks, i)] >> 4, words[block_of(blocks, i)] & 15);
    });
    return out.end();
  }
};

// Writes the bitmap of the blocks; entries: what the next kMostCodeBits bits begin with, one block in the lower half,
// two where they fit in the upper half. Returns the bytes that the blocks take, -1 if some are missing.
inline int64_t read_blocks(const uint32_t* entries, const uint8_t* from, int64_t num_bytes, int64_t num_blocks,
                           uint8_t* bitmap) {
  const uint8_t *const begin = from, *const end = from + num_bytes;
  BitWriter out{bitmap};
  uint64_t held = 0;
  int64_t num_held = 0, num_missing = 0;
  while (num_blocks > 0) {
    if (num_held < kMostCodeBits && end - from >= 4) {
      uint32_t word;
      std::memcpy(&word, from, 4);
      held = held << 32 | __builtin_bswap32(word);
      num_held += 32;
      from += 4;
    }
    for (; num_held < kMostCodeBits; num_held += 8) {
      held = held << 8 | (from < end ? *from++ : (num_missing += 8, 0));
    }
    do {
      uint32_t entry = entries[held >> (num_held - kMostCodeBits) & ((1 << kMostCodeBits) - 1)];
      entry = num_blocks > 1 ? entry >> 16 : entry & 0xffff;
      const int num = 1 + (entry >> 4 & 1);
      num_held -= entry & 15;
      num_blocks -= num;
      out.put(entry >> 5, kBlockBits * num);
    } while (num_blocks > 0 && num_held >= kMostCodeBits);
  }
  out.end();
  return num_held < num_missing ? -1 : from - begin - (num_held - num_missing) / 8;
}

struct Places {
  int kind;
  int64_t num_bytes;
};

// Places of `count` entries among `numel`, from the number of the others before each. to: room for two bitmaps and 24
// bytes.
inline Places write_places(const int32_t* gaps, int64_t count, int64_t numel, const uint16_t* codes, uint8_t* to) {
  if (count == numel) return {kAll, 0};
  if (!count) return {0, 0};
  const RiceCode code = rice_code(gaps, count);
  const int64_t num_bytes = (numel + 7) / 8, num_blocks = (numel + kBlockBits - 1) / kBlockBits;
  const auto write_bitmap = [=](uint8_t* at, int64_t size) {
    uint8_t* const end = write_rice(gaps, count, 0, at);  // gaps in unary are the bitmap up to its last one
    std::memset(end, 0, at + size - end);
  };
  if (numel < 5 * count) {
    uint8_t* const bitmap = to + num_bytes + 8;
    write_bitmap(bitmap, num_bytes + 8);
    BlockCode blocks{codes};
    blocks.choose(bitmap, num_blocks);
    if (blocks.num_bits < std::min(code.num_bits, numel))
      return {kBlocks + blocks.which, blocks.write(bitmap, num_blocks, to) - to};
  }
  if (code.num_bits < numel) return {code.low, write_rice(gaps, count, code.low, to) - to};
  write_bitmap(to, num_bytes);
  return {kBitmap, num_bytes};
}

// Returns the bytes that the places take, -1 if they are none.
template <typename Index>
int64_t read_places(int kind, const uint8_t* from, int64_t num_bytes, int64_t count, int64_t numel,
                    const uint32_t* entries, Index* indices) {
  if (kind == kAll) {
    for (int64_t i = 0; i < numel && count == numel; ++i) indices[i] = static_cast<Index>(i);
    return count == numel ? 0 : -1;
  }
  if (count > numel) return -1;
  const auto read_bitmap = [=](const uint8_t* bitmap, int64_t size) {
    return find_ones(bitmap, size, count, indices) == count && (!count || indices[count - 1] < numel);
  };
  if (kind == kBitmap) {
    const int64_t needed = (numel + 7) / 8;
    return num_bytes >= needed && read_bitmap(from, needed) ? needed : -1;
  }
  if (kBlocks <= kind && kind < kBlocks + kBlockCodes) {
    // The bitmap lies at the end of the room for the indices. With one zero at least, no index is written over a word
    // that has not been read.
    const int64_t num_blocks = (numel + kBlockBits - 1) / kBlockBits, size = (num_blocks * kBlockBits + 7) / 8;
    uint8_t* const bitmap = reinterpret_cast<uint8_t*>(indices + numel) - size;
    if (count == numel) return -1;
    const int64_t used =
        read_blocks(entries + ((kind - kBlocks) << kMostCodeBits), from, num_bytes, num_blocks, bitmap);
    return used >= 0 && read_bitmap(bitmap, size) ? used : -1;
  }
  int64_t at = -1;
  const auto take = [&](int64_t i, int64_t gap) { indices[i] = static_cast<Index>(at += gap + 1); };
  const int64_t used = read_rice(from, num_bytes, count, kind, indices, take);
  return at < numel ? used : -1;
}

inline int64_t above(const float* values, int64_t numel, float threshold, int64_t* indices) {
  const uint32_t least = std::max(1u, magnitude_bits(threshold));
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) {  // without branches, which no processor could predict
    indices[count] = i;
    count += magnitude_bits(values[i]) - least <= kInfinite - least;  // nan is above infinity
  }
  return count;
}

// Keeps the values of at least `level`, in place, and writes the number of the others before each. Returns how many.
template <typename Value>
int64_t keep_reaching(Value* values, int64_t count, int level, int32_t* gaps) {
  int64_t num_kept = 0, last = -1;
  for (int64_t i = 0; i < count; ++i) {  // without branches, as above
    const bool reaches = values[i] >= level;
    gaps[num_kept] = static_cast<int32_t>(i - last - 1);
    values[num_kept] = values[i];
    last = reaches ? i : last;
    num_kept += reaches;
  }
  return num_kept;
}

// Writes the bucket of `numel` entries from `first` on. gaps and alive: room for `count` numbers each.
inline uint8_t* write_levels(const int64_t* indices, const float* values, int64_t count, int64_t first, int64_t numel,
                             const uint16_t* codes, int32_t* gaps, uint8_t* alive, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) gaps[i] = static_cast<int32_t>(indices[i] - (i ? indices[i - 1] + 1 : first));
  uint32_t least = kInfinite, most = 0;
  for (int64_t i = 0; i < count; ++i) {
    least = std::min(least, magnitude_bits(values[i]));
    most = std::max(most, magnitude_bits(values[i]));
  }
  if (most >= kInfinite) return nullptr;
  const float lowest = float_of(least);
  for (int64_t i = 0; i < count; ++i) {
    const float ratio = std::fabs(values[i]) / lowest;
    alive[i] = static_cast<uint8_t>(static_cast<int32_t>(ratio < kMaxLevels ? ratio : kMaxLevels) - 1);
  }
  if (!least) std::memset(alive, 0, count);
  // The reference adds one value after the other. Below the last level, which has no upper bound, any order gives the
  // same sum: 2^26 multiples of the lowest value's last bit, each below 2^27 of them, are added without rounding. Four
  // parts, because an addition must wait for the one before it.
  constexpr int kParts = 4;
  int64_t inside[kMaxLevels] = {}, counts[kParts][kMaxLevels] = {};
  double sums[kMaxLevels] = {}, part_sums[kParts][kMaxLevels] = {};
  const int64_t parts = count <= 1 << 26 ? kParts - 1 : 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t part = alive[i] == kMaxLevels - 1 ? 0 : i & parts;
    ++counts[part][alive[i]];
    part_sums[part][alive[i]] += std::fabs(values[i]);
  }
  for (int part = 0; part < kParts; ++part)
    for (int level = 0; level < kMaxLevels; ++level)
      inside[level] += counts[part][level], sums[level] += part_sums[part][level];
  int num_levels = kMaxLevels;
  while (num_levels && !inside[num_levels - 1]) --num_levels;
  *to++ = static_cast<uint8_t>(num_levels);
  uint8_t* table = to;
  to += kLevelBytes * num_levels;
  int64_t reached = count, among = numel;
  for (int level = 0; level < num_levels; ++level, table += kLevelBytes) {
    if (level) among = reached, reached = keep_reaching(alive, among, level, gaps);
    const Places places = write_places(gaps, reached, among, codes, to);
    to += places.num_bytes;
    const float mean = static_cast<float>(sums[level] / static_cast<double>(std::max<int64_t>(1, inside[level])));
    uint32_t bits;
    std::memcpy(&bits, &mean, 4);
    write_32(table, static_cast<uint32_t>(reached));
    write_32(table + 4, bits);
    table[8] = static_cast<uint8_t>(places.kind);
  }
  return write_single_bits(count, to, [=](int64_t i) { return static_cast<unsigned>(std::signbit(values[i])); });
}

// Reads one bucket; `from` moves behind it. Returns the number of entries. indices and values: room for `numel`, and
// reached for twice as many.
inline int64_t read_levels(const uint8_t** from, const uint8_t* end, int64_t numel, const uint32_t* entries,
                           int64_t* indices, float* values, int32_t* reached) {
  const uint8_t* row = *from;
  if (row == end) return -1;
  const int num_levels = *row++;
  if (kLevelBytes * num_levels > end - row) return -1;
  const uint8_t* at = row + kLevelBytes * num_levels;
  int64_t among = numel, num_entries = 0;
  for (int level = 0; level < num_levels; ++level, row += kLevelBytes) {
    const int64_t count = read_32(row);
    const float mean = float_of(read_32(row + 4));
    int32_t* const places = reached + numel;
    const int64_t used = level ? read_places(row[8], at, end - at, count, among, entries, places)
                               : read_places(row[8], at, end - at, count, among, entries, indices);
    if (used < 0) return -1;
    if (!level) {
      num_entries = count;
      for (int64_t i = 0; i < count; ++i) reached[i] = static_cast<int32_t>(i), values[i] = mean;
    } else {
      // A list of places ascends, so each number is written over one that has been read.
      for (int64_t i = 0; i < count; ++i) values[reached[i] = reached[places[i]]] = mean;
    }
    at += used;
    among = count;
  }
  if ((num_entries + 7) / 8 > end - at) return -1;
  for (int64_t i = 0; i < num_entries; ++i) values[i] = at[i / 8] >> (7 - i % 8) & 1 ? -values[i] : values[i];
  *from = at + (num_entries + 7) / 8;
  return num_entries;
}

// Moves from the median, folded: 0, 1, -1, 2, -2, ... become 0, 1, 2, 3, 4, ... scratch: room for 4 `numel` numbers.
inline int64_t write_moves(const float* moves, int64_t numel, const uint16_t* codes, int32_t* scratch, uint8_t* to) {
  constexpr float kMost = 1 << 28;
  int32_t *const folded = scratch, *const gaps = folded + numel, *const others = gaps + numel;
  int32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i) {
    folded[i] = static_cast<int32_t>(std::fabs(moves[i]) < kMost ? moves[i] : kMost);
    largest = std::max(largest, folded[i]);
  }
  if (!numel || largest >= kMost || numel > std::numeric_limits<int32_t>::max()) return -1;
  std::memcpy(gaps, folded, sizeof(int32_t) * numel);
  std::nth_element(gaps, gaps + numel / 2, gaps + numel);
  int32_t middle = gaps[numel / 2];
  if (numel % 2 == 0) middle = (middle + *std::max_element(gaps, gaps + numel / 2)) / 2;
  int64_t count = 0, last = -1;
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t left = folded[i] - middle;
    folded[i] = left > 0 ? 2 * left - 1 : -2 * left;
    gaps[count] = static_cast<int32_t>(i - last - 1);
    others[count] = left;
    last = left ? i : last;
    count += left != 0;
  }
  int32_t* const values = others + numel;
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, values[i] = std::abs(others[i]));
  const int num_lists = std::min(most, kMaxLevels);
  uint8_t *table = to + kMovesBytes, *at = table + kListBytes * num_lists;
  int64_t reached = count, among = numel;
  for (int level = 1; level <= num_lists; ++level, table += kListBytes) {
    if (level > 1) among = reached, reached = keep_reaching(values, among, level, gaps);
    const Places places = write_places(gaps, reached, among, codes, at);
    at += places.num_bytes;
    write_32(table, static_cast<uint32_t>(reached));
    table[4] = static_cast<uint8_t>(places.kind);
  }
  for (int64_t i = 0; i < reached; ++i) values[i] -= num_lists;
  at = write_single_bits(count, at, [=](int64_t i) { return static_cast<unsigned>(others[i] < 0); });
  const RiceCode code = rice_code(values, reached), dense = rice_code(folded, numel);
  const bool is_dense = dense.num_bits <= 8 * (at - to - kMovesBytes) + code.num_bits;
  write_32(to, static_cast<uint32_t>(middle));
  to[4] = static_cast<uint8_t>(is_dense ? kAll : num_lists);
  to[5] = static_cast<uint8_t>(is_dense ? dense.low : code.low);
  if (is_dense) return write_rice(folded, numel, dense.low, to + kMovesBytes) - to;
  return write_rice(values, reached, code.low, at) - to;
}

// scratch: room for 4 `numel` numbers.
inline int64_t read_moves(const uint8_t* from, int64_t num_bytes, int64_t numel, const uint32_t* entries,
                          int32_t* scratch, float* moves) {
  if (num_bytes < kMovesBytes || numel > std::numeric_limits<int32_t>::max()) return -1;
  const int64_t middle = static_cast<int32_t>(read_32(from));
  const int num_lists = from[4], low = from[5];
  const uint8_t *const end = from + num_bytes, *row = from + kMovesBytes, *at = row + kListBytes * num_lists;
  int32_t *const places = scratch, *const reached = places + numel, *const list = reached + numel,
                 *const sizes = list + numel;
  if (num_lists == kAll) {
    const auto take = [&](int64_t i, int64_t folded) {
      moves[i] = static_cast<float>((folded & 1 ? (folded + 1) / 2 : -folded / 2) + middle);
    };
    return read_rice(row, end - row, numel, low, list, take) < 0 ? -1 : numel;
  }
  if (kListBytes * num_lists > end - row) return -1;
  int64_t num_others = 0, among = numel;
  for (int level = 1; level <= num_lists; ++level, row += kListBytes) {
    const int64_t count = read_32(row);
    const int64_t used = read_places(row[4], at, end - at, count, among, entries, level > 1 ? list : places);
    if (used < 0) return -1;
    if (level == 1) {
      num_others = count;
      for (int64_t i = 0; i < count; ++i) sizes[reached[i] = static_cast<int32_t>(i)] = 1;
    } else {
      for (int64_t i = 0; i < count; ++i) sizes[reached[i] = reached[list[i]]] = level;
    }
    at += used;
    among = count;
  }
  const uint8_t* const signs = at;
  at += (num_others + 7) / 8;
  bool is_large = false;
  const auto take = [&](int64_t i, int64_t value) {
    is_large |= value >= 1 << 30;
    sizes[reached[i]] += static_cast<int32_t>(value);
  };
  if (at > end || (num_lists && read_rice(at, end - at, among, low, list, take) < 0) || is_large) return -1;
  for (int64_t i = 0; i < numel; ++i) moves[i] = static_cast<float>(middle);
  for (int64_t i = 0; i < num_others; ++i)
    moves[places[i]] = static_cast<float>(middle + (signs[i / 8] >> (7 - i % 8) & 1 ? -sizes[i] : sizes[i]));
  return numel;
}

}  // namespace
