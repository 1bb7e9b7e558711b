/*
 * blake2b.c: BLAKE2b without a key (RFC 7693).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/blake2b.h"

#define BLOCK_BYTES 128
#define DIGEST_BYTES 8

static const uint64 initial[8] = {
	UINT64CONST(0x6A09E667F3BCC908), UINT64CONST(0xBB67AE8584CAA73B),
	UINT64CONST(0x3C6EF372FE94F82B), UINT64CONST(0xA54FF53A5F1D36F1),
	UINT64CONST(0x510E527FADE682D1), UINT64CONST(0x9B05688C2B3E6C1F),
	UINT64CONST(0x1F83D9ABFB41BD6B), UINT64CONST(0x5BE0CD19137E2179),
};

/* The order of the words of a block in each round; the last two are the first two. */
static const uint8 orders[10][16] = {
	{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
	{14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
	{11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
	{7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
	{9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
	{2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
	{12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
	{13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
	{6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
	{10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64
rotated(uint64 x, int bits)
{
	return (x >> bits) | (x << (64 - bits));
}

static uint64
word(const unsigned char *bytes)
{
	uint64		number = 0;

	for (int i = 7; i >= 0; i--)
		number = number << 8 | bytes[i];
	return number;
}

static void
mix(uint64 *v, int a, int b, int c, int d, uint64 x, uint64 y)
{
	v[a] += v[b] + x;
	v[d] = rotated(v[d] ^ v[a], 32);
	v[c] += v[d];
	v[b] = rotated(v[b] ^ v[c], 24);
	v[a] += v[b] + y;
	v[d] = rotated(v[d] ^ v[a], 16);
	v[c] += v[d];
	v[b] = rotated(v[b] ^ v[c], 63);
}

static void
compress(uint64 *state, const unsigned char *block, uint64 length, bool is_last)
{
	uint64		v[16];
	uint64		m[16];

	for (int i = 0; i < 8; i++)
	{
		v[i] = state[i];
		v[i + 8] = initial[i];
	}
	v[12] ^= length;
	if (is_last)
		v[14] = ~v[14];
	for (int i = 0; i < 16; i++)
		m[i] = word(block + 8 * i);
	for (int round = 0; round < 12; round++)
	{
		const uint8 *order = orders[round % 10];

		for (int i = 0; i < 4; i++)
			mix(v, i, i + 4, i + 8, i + 12, m[order[2 * i]], m[order[2 * i + 1]]);
		for (int i = 0; i < 4; i++)
			mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[order[2 * i + 8]],
				m[order[2 * i + 9]]);
	}
	for (int i = 0; i < 8; i++)
		state[i] ^= v[i] ^ v[i + 8];
}

uint64
blake2b_hash(const char *bytes, Size length)
{
	uint64		state[8];
	unsigned char last[BLOCK_BYTES] = {0};
	Size		done = 0;

	memcpy(state, initial, sizeof(state));
	state[0] ^= 0x01010000 ^ DIGEST_BYTES;
	while (length - done > BLOCK_BYTES)
	{
		done += BLOCK_BYTES;
		compress(state, (const unsigned char *) bytes + done - BLOCK_BYTES, done, false);
	}
	if (length > done)
		memcpy(last, bytes + done, length - done);
	compress(state, last, length, true);
	return state[0];
}
