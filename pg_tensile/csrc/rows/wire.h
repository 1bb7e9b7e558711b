/*
 * wire.h: frames on a Unix stream socket (docs/internals.md, "Frames").
 *
 * The protocol is separate from the waiting: FrameWriter and FrameReader send
 * and receive what the socket can without blocking; the caller waits and calls
 * again.  wire_send() does both for callers that only send.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_WIRE_H
#define TENSILE_WIRE_H

#include "lib/stringinfo.h"

#define FRAME_MAX_HEADER (16 * 1024 * 1024)
#define FRAME_MAX_BUFFERS 65536
#define FRAME_MAX_PAYLOAD ((uint64) 1024 * 1024 * 1024)

typedef enum FrameType
{
	FRAME_HELLO = 1,
	FRAME_JOB = 2,
	FRAME_COLUMNS = 3,
	FRAME_ROWS = 4,
	FRAME_ROWS_END = 5,
	FRAME_ERROR = 14,
	FRAME_PREDICT = 20,
	FRAME_PREDICTION = 21,
	FRAME_EMBED = 27,
	FRAME_EMBEDDING = 28,
	FRAME_PASSED = 39
} FrameType;

typedef struct WireBuffer
{
	const void *data;
	Size		length;
} WireBuffer;

/* A frame to be sent.  The caller must not change its buffers meanwhile. */
typedef struct FrameWriter
{
	struct iovec *parts;
	int			nparts;
	int			next;			/* first part not sent completely */
	int			capacity;		/* parts allocated */
	char	   *head;			/* of the frame, with header and lengths */
	Size		head_capacity;
	MemoryContext context;
} FrameWriter;

/* A frame in the reader's memory, valid until the next frame_reader_next(). */
typedef struct Frame
{
	uint16		type;
	int64		job;
	const char *header;
	uint32		header_length;
	uint32		nbuffers;
	const WireBuffer *buffers;
} Frame;

typedef struct FrameReader
{
	char	   *data;
	Size		used;			/* bytes received */
	Size		taken;			/* bytes of the frame returned last */
	Size		capacity;
	Frame		frame;
	WireBuffer *buffers;
	uint32		buffers_capacity;
	Size		max_payload;	/* that this reader accepts */
	MemoryContext context;
} FrameReader;

typedef enum IoResult
{
	IO_DONE,
	IO_AGAIN,					/* wait for the socket */
	IO_CLOSED,					/* by the other side */
	IO_MALFORMED				/* not a frame (reading only) */
} IoResult;

extern void frame_writer_init(FrameWriter *writer, MemoryContext context);

/* Prepares a frame; 54000 if it exceeds the limits of the format. */
extern void frame_writer_begin(FrameWriter *writer, FrameType type, int64 job, const char *header,
							   Size header_length, const WireBuffer *buffers, int nbuffers);

/* Sends as much of the frame as the socket takes. */
extern IoResult frame_writer_some(FrameWriter *writer, int fd);

extern void frame_reader_init(FrameReader *reader, Size max_payload, MemoryContext context);

/* Forgets what was received, for a new connection. */
extern void frame_reader_reset(FrameReader *reader);

/*
 * Has it received bytes behind the last frame already?  Then the socket need
 * not become readable for the next one.
 */
extern bool frame_reader_has_some(const FrameReader *reader);

/* Receives what there is, and returns the next frame if it is complete. */
extern IoResult frame_reader_next(FrameReader *reader, int fd, const Frame **frame);

/*
 * Sends a frame.  Raises 08006 when the peer has closed the connection, or has
 * taken nothing for timeout_ms (< 0: no limit).
 */
extern void wire_send(FrameWriter *writer, int fd, const char *peer, long timeout_ms,
					  FrameType type, int64 job, const char *header, Size header_length,
					  const WireBuffer *buffers, int nbuffers);

#endif
