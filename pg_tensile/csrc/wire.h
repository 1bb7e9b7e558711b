/*
 * wire.h: frames on a Unix stream socket (docs/internals.md, "Frames").
 *
 * The protocol is separate from the waiting: a FrameWriter and a FrameReader take or give what the socket can without
 * blocking; the caller waits (tensile_wait_socket) and calls again. wire_send() does both for callers that only send.
 */
#ifndef TENSILE_WIRE_H
#define TENSILE_WIRE_H

#include "postgres.h"

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
	FRAME_PREDICTION = 21
} FrameType;

typedef struct WireBuffer
{
	const void *data;
	Size		length;
} WireBuffer;

/* One frame on its way out. The buffers stay the caller's and must not change until it is sent. */
typedef struct FrameWriter
{
	struct iovec *parts;
	int			nparts;
	int			next;			/* first part that is not sent entirely */
	int			capacity;		/* parts allocated */
	char	   *head;			/* frame head, header and table of lengths */
	Size		head_capacity;
	MemoryContext context;
} FrameWriter;

/* One frame that came in, inside the reader's memory: valid until the next frame_reader_next(). */
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
	Size		taken;			/* bytes of the frame handed out last */
	Size		capacity;
	Frame		frame;
	WireBuffer *buffers;
	uint32		buffers_capacity;
	Size		max_payload;	/* what this reader accepts */
	MemoryContext context;
} FrameReader;

typedef enum IoResult
{
	IO_DONE,
	IO_AGAIN,					/* wait for the socket */
	IO_CLOSED,					/* the other side is gone */
	IO_MALFORMED				/* not our protocol (reading only) */
} IoResult;

extern void frame_writer_init(FrameWriter *writer, MemoryContext context);
/* Refuses (54000) what exceeds the format's limits, before anything is sent. */
extern void frame_writer_begin(FrameWriter *writer, FrameType type, int64 job, const char *header, Size header_length,
							   const WireBuffer *buffers, int nbuffers);
extern IoResult frame_writer_some(FrameWriter *writer, int fd);

extern void frame_reader_init(FrameReader *reader, Size max_payload, MemoryContext context);
extern void frame_reader_reset(FrameReader *reader);
/* Bytes behind the frame handed out last are there already: the socket need not become readable for the next one. */
extern bool frame_reader_has_some(const FrameReader *reader);
/* The next frame if it is whole. */
extern IoResult frame_reader_next(FrameReader *reader, int fd, const Frame **frame);

/*
 * Sends one frame. 08006 when the other side is gone ("<peer> went away"), or takes nothing for timeout_ms (< 0: waits
 * as long as it takes).
 */
extern void wire_send(FrameWriter *writer, int fd, const char *peer, long timeout_ms, FrameType type, int64 job,
					  const char *header, Size header_length, const WireBuffer *buffers, int nbuffers);

#endif
